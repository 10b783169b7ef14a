// Thread-local words on hot paths. The initial-exec model reads them with one instruction, also
// in a library that was loaded by dlopen; the room for such words is small (about a kilobyte for
// all libraries of a process), so only single words are declared
// so, and a library that has one keeps its larger thread-local objects on the heap.
#pragma once

#define MYBACKEND_HOT_THREAD_LOCAL thread_local constinit __attribute__((tls_model("initial-exec")))
