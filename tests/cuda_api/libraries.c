/* The bodies that libraries other than libcudart need; each library takes those of its own symbols. */

#include <stddef.h>
#include <string.h>

#ifndef API
#define API __attribute__((visibility("default")))
#endif

#ifdef libnccl
/* One rank: what goes in comes out. */

typedef struct { char internal[128]; } unique_id;

static size_t size_of(int type) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return sizes[type];
}
static int copied(const void *from, void *to, size_t count, int type) {
    if (from != to) memmove(to, from, count * size_of(type));
    return 0;
}
static int communicator;

API int ncclGetVersion(int *out) { return *out = 22809, 0; }
API int ncclGetUniqueId(unique_id *out) { return memset(out, 0, sizeof *out), 0; }
API const char *ncclGetErrorString(int error) { return error ? "an error of NCCL" : "no error"; }
API const char *ncclGetLastError(void *comm) { return ""; }
API int ncclCommInitRank(void **out, int ranks, unique_id id, int rank) { return *out = &communicator, ranks == 1 ? 0 : 4; }
API int ncclCommInitRankConfig(void **out, int ranks, unique_id id, int rank, void *config) {
    return *out = &communicator, ranks == 1 ? 0 : 4;
}
API int ncclCommInitRankScalable(void **out, int ranks, int rank, int ids, unique_id *id, void *config) {
    return *out = &communicator, ranks == 1 ? 0 : 4;
}
API int ncclCommSplit(void *comm, int color, int key, void **out, void *config) { return *out = &communicator, 0; }
API int ncclCommGetAsyncError(void *comm, int *out) { return *out = 0, 0; }
API int ncclCommCount(void *comm, int *out) { return *out = 1, 0; }
API int ncclCommUserRank(void *comm, int *out) { return *out = 0, 0; }
API int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, void *comm, void *stream) {
    return copied(from, to, count, type);
}
API int ncclReduce(const void *from, void *to, size_t count, int type, int op, int root, void *comm, void *stream) {
    return copied(from, to, count, type);
}
API int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, void *comm, void *stream) {
    return copied(from, to, count, type);
}
API int ncclAllGather(const void *from, void *to, size_t count, int type, void *comm, void *stream) {
    return copied(from, to, count, type);
}
API int ncclAlltoAll(const void *from, void *to, size_t count, int type, void *comm, void *stream) {
    return copied(from, to, count, type);
}
API int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, void *comm, void *stream) {
    return copied(from, to, count, type);
}
API int ncclGather(const void *from, void *to, size_t count, int type, int root, void *comm, void *stream) {
    return copied(from, to, count, type);
}
#endif

#ifdef libcudnn
API size_t cudnnGetVersion(void) { return 91900; }
API size_t cudnnGetCudartVersion(void) { return 13000; }
API const char *cudnnGetErrorString(int error) { return "an error of cuDNN"; }
#endif

#ifdef libcublas
API const char *cublasGetStatusString(int error) { return "an error of cuBLAS"; }
#endif

#ifdef libcublasLt
API size_t cublasLtGetVersion(void) { return 130000; }
API int cublasLtMatmulAlgoGetHeuristic(void *handle, void *op, void *a, void *b, void *c, void *d, void *preference, int asked,
                                       void *results, int *found) {
    return *found = 1, 0;
}
#endif

#ifdef libcusparse
API const char *cusparseGetErrorString(int error) { return "an error of cuSPARSE"; }
#endif

#ifdef libnvrtc
API const char *nvrtcGetErrorString(int error) { return "an error of NVRTC"; }
API int nvrtcVersion(int *major, int *minor) { return *major = 13, *minor = 0, 0; }
#endif

#ifdef libcuda
API int cuGetErrorString(int error, const char **out) { return *out = "an error of the driver", 0; }
API int cuDeviceGet(int *out, int ordinal) { return *out = ordinal, 0; }
API int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *flags = 0, *active = 1, 0; }
static int context;
API int cuCtxGetCurrent(void **out) { return *out = &context, 0; }
API int cuDevicePrimaryCtxRetain(void **out, int device) { return *out = &context, 0; }
#endif

#ifdef libcupti
/* A profiler that sees nothing: there are no records. */
API int cuptiActivityGetNextRecord(void *buffer, size_t nbytes, void **record) { return 12; }
API int cuptiActivityGetNumDroppedRecords(void *context, unsigned stream, size_t *out) { return *out = 0, 0; }
API int cuptiGetVersion(unsigned *out) { return *out = 130000, 0; }
API int cuptiGetResultString(int result, const char **out) { return *out = "a result of CUPTI", 0; }
API int cuptiGetCallbackName(int domain, unsigned id, const char **out) { return *out = "", 0; }
API int cuptiSubscribe(void **out, void *call, void *with) { return *out = &out, 0; }
#endif

#ifdef libnvidia_ml
/* What torch adds to the text of an out of memory: the processes on the device, of which there are none. */
static int device;
API int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **out) { return *out = &device, 0; }
API int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, void *out) { return *count = 0, 0; }
API int nvmlDeviceGetCount_v2(unsigned *out) { return *out = 0, 0; }
API const char *nvmlErrorString(int error) { return "an error of NVML"; }
#endif
