// A stand-in for libnvidia-ml.so.1: it starts, finds a device, and supports nothing else.
namespace {
constexpr int kSuccess = 0, kNotSupported = 3;
}

extern "C" {
int nvmlInit_v2() {
  return kSuccess;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  *device = reinterpret_cast<void*>(static_cast<unsigned long>(index) + 1);
  return kSuccess;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  return nvmlDeviceGetHandleByIndex_v2(0, device);
}
int nvmlDeviceGetHandleByUUID(const char*, void** device) {
  return nvmlDeviceGetHandleByIndex_v2(0, device);
}
int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13000;
  return kSuccess;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned* count, void*) {
  *count = 0;
  return kSuccess;
}
int nvmlDeviceGetComputeRunningProcesses(void* device, unsigned* count, void* infos) {
  return nvmlDeviceGetComputeRunningProcesses_v3(device, count, infos);
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, void*) {
  return kNotSupported;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) {
  return kNotSupported;
}
int nvmlDeviceGetGpuFabricInfoV(void*, void*) {
  return kNotSupported;
}
}
