"""Cases that do not pass, one line each with the reason, by group, as NAME or NAME:DTYPE. A case that
passes although it is listed fails its test."""

SPARSE = "sparse layouts are refused by name"
FAKE_BATCH_NORM = "PyTorch's fake statistics in evaluation are empty for the CPU alone"

CHUNKS = "PyTorch chooses chunks and accumulation by the device's type"
SPARSE_OPS = {"sparse.sampled_addmm": SPARSE, "to_sparse": SPARSE}
LINEAR_CROSS_ENTROPY = {
    f"nn.functional.linear_cross_entropy.{variant}:{dtype}": CHUNKS
    for variant in ("chunked", "chunked_none")
    for dtype in ("bfloat16", "float16")
}

EXCLUSIONS: dict[str, dict[str, str]] = {
    "forward": SPARSE_OPS | LINEAR_CROSS_ENTROPY,
    "backward": SPARSE_OPS | LINEAR_CROSS_ENTROPY,
    "out": {
        "lu": "its out= is a copy that PyTorch makes to any device: one on the CPU is accepted",
        "mode": "PyTorch refuses its out= variant on devices other than CPU, CUDA and XPU",
        "sparse.sampled_addmm": SPARSE,
    },
    "noncontiguous": SPARSE_OPS,
    "views": SPARSE_OPS,
    "conjugate": SPARSE_OPS,
    "negative": {
        "to_sparse": SPARSE,
        "nn.functional.max_pool1d": "the CPU reads past the negative bit; the result here is right",
    },
    "gradgrad": SPARSE_OPS,
    "fake": SPARSE_OPS | {"_native_batch_norm_legit": FAKE_BATCH_NORM, "native_batch_norm": FAKE_BATCH_NORM},
    "module_step": {
        "nn.LinearCrossEntropyLoss.train:bfloat16": CHUNKS,
        "nn.LinearCrossEntropyLoss.train:float16": CHUNKS,
    },
}
