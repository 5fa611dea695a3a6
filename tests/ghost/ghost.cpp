// A stub driver: one preloaded library in place of the CUDA runtime, the driver, NVML, cuBLAS and NCCL. Every call
// succeeds and no kernel runs. Device memory is address space without pages: what the host copies there is lost, and
// what it reads back is zero (with GHOST_COPIES=1 copies are made, and what no copy wrote is arbitrary).
//
// This file defines the functions that must return something or are reported; setup.sh adds one that does nothing for
// each other function that torch's libraries call.
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <nccl.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

using std::string, std::to_string;
using Hold = std::lock_guard<std::mutex>;
static int number(const char* variable, int otherwise) { const char* s = getenv(variable); return s && *s ? atoi(s) : otherwise; }
static int n_devices() { return number("GHOST_DEVICES", 8); }
static size_t capacity() { return (size_t)number("GHOST_MEMORY_GIB", 79) << 30; }
static bool keeps_copies() { static bool keeps = number("GHOST_COPIES", 0); return keeps; }
static void capability(int* major, int* minor) {
  const char* s = getenv("GHOST_CAPABILITY");
  if (!s || sscanf(s, "%d.%d", major, minor) != 2) *major = 9, *minor = 0;
}

// The body of a function that runs its arguments and succeeds; success is 0 in each of these libraries.
struct Success { template <class T> operator T() const { return (T)0; } };
#define OK(...) { __VA_ARGS__; return Success(); }

extern "C" {
// ------------------------------------------------------------------- what trace.py and memory.py read

static void (*report)(const char* what, int device, long bytes);
enum { LAUNCHES, PRODUCTS, MALLOCS, FREES, N_COUNTS };
static std::atomic<long> counts[N_COUNTS];
static thread_local int current;  // device
static std::atomic<bool> has_context[64];

void ghost_report(void (*to)(const char*, int, long)) { report = to; }
void ghost_counts(long* out) { for (int i = 0; i < N_COUNTS; i++) out[i] = counts[i]; }
void ghost_count_product() { counts[PRODUCTS]++; }
static void notify(const string& what, long bytes = 0) { if (report) report(what.c_str(), current, bytes); }
static void touch(const char* by) {  // in a call for which CUDA makes a context where the device has none
  if (!has_context[current].exchange(true)) notify(string("context by ") + by);
}

// ---------------------------------------------------------------------------------------- runtime: devices

cudaError_t cudaGetDeviceCount(int* n) OK(*n = n_devices())
cudaError_t cudaGetDevice(int* d) OK(*d = current)
cudaError_t cudaSetDevice(int d) {
  if (d < 0 || d >= n_devices()) return cudaErrorInvalidDevice;
  current = d;
  touch("cudaSetDevice");
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* v) OK(*v = CUDART_VERSION)
cudaError_t cudaRuntimeGetVersion(int* v) OK(*v = CUDART_VERSION)
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int d) {  // those of an H100
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", getenv("GHOST_NAME") ? getenv("GHOST_NAME") : "NVIDIA H100 80GB HBM3");
  capability(&p->major, &p->minor);
  p->totalGlobalMem = capacity(); p->totalConstMem = 65536; p->l2CacheSize = 50 << 20; p->memoryBusWidth = 5120;
  p->sharedMemPerBlock = 49152; p->sharedMemPerBlockOptin = 232448; p->sharedMemPerMultiprocessor = 233472;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536; p->warpSize = 32; p->multiProcessorCount = 132;
  p->maxThreadsPerBlock = 1024; p->maxThreadsPerMultiProcessor = 2048; p->maxBlocksPerMultiProcessor = 32;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535; p->textureAlignment = 512;
  p->unifiedAddressing = p->concurrentKernels = p->canMapHostMemory = 1; p->asyncEngineCount = 3;
  p->pciBusID = d; p->uuid.bytes[0] = d + 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr attribute, int d) {
  cudaDeviceProp p;
  cudaGetDeviceProperties(&p, d);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *v = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *v = p.minor; break;
    case cudaDevAttrMultiProcessorCount: *v = p.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *v = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxThreadsPerBlock: *v = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = p.sharedMemPerBlockOptin; break;
    default: *v = 1;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int n, int d) OK(snprintf(id, n, "0000:%02x:00.0", d))
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* most) OK(*least = 0; *most = -5)
cudaError_t cudaDeviceCanAccessPeer(int* v, int, int) OK(*v = 1)
const char* cudaGetErrorString(cudaError_t e) { return e == cudaErrorMemoryAllocation ? "out of memory" : e ? "stub driver error" : "no error"; }
const char* cudaGetErrorName(cudaError_t e) { return e ? "cudaErrorGhost" : "cudaSuccess"; }

// ----------------------------------------------------------------------------- runtime: streams and events

static std::atomic<long> handles{0x1000};
static Success handle(void* h, const char* by) { touch(by); *(long*)h = handles += 16; return {}; }
cudaError_t cudaStreamCreate(cudaStream_t* s) { return handle(s, "cudaStreamCreate"); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) { return handle(s, "cudaStreamCreate"); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int) { return handle(s, "cudaStreamCreate"); }
cudaError_t cudaEventCreate(cudaEvent_t* e) { return handle(e, "cudaEventCreate"); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return handle(e, "cudaEventCreate"); }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) OK(*ms = 1)
cudaError_t cudaStreamGetPriority(cudaStream_t, int* p) OK(*p = 0)
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* s) OK(*s = cudaStreamCaptureStatusNone)
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* s, unsigned long long*, cudaGraph_t*, const cudaGraphNode_t**,
                                     const cudaGraphEdgeData**, size_t*) OK(*s = cudaStreamCaptureStatusNone)
static Success blocks(const char* what) { touch(what); notify(what); return {}; }
cudaError_t cudaDeviceSynchronize() { return blocks("cudaDeviceSynchronize"); }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return blocks("cudaStreamSynchronize"); }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return blocks("cudaEventSynchronize"); }

// --------------------------------------------------------------------------------------- runtime: launches

static Success launch() OK(counts[LAUNCHES]++)
static thread_local struct { dim3 grid, block; size_t shared; void* stream; } launch_as;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) OK(launch_as = {grid, block, shared, stream})
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream)
  OK(*grid = launch_as.grid; *block = launch_as.block; *shared = launch_as.shared; *(void**)stream = launch_as.stream)
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* address) OK(*kernel = (cudaKernel_t)address)
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) { return launch(); }
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) { return launch(); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) { return launch(); }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) OK(*n = 2)
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*)
  OK(memset(a, 0, sizeof *a); a->maxThreadsPerBlock = 1024; a->numRegs = 32; a->binaryVersion = a->ptxVersion = 90)

// ----------------------------------------------------------------------------------------- runtime: memory

struct Range { size_t size; int device; };
static std::mutex memory_lock;
static std::map<char*, Range> device_memory, pinned_memory;
static size_t used[64];

static bool find(std::map<char*, Range>& ranges, const void* p, int* device = nullptr) {
  Hold h(memory_lock);
  auto it = ranges.upper_bound((char*)p);
  if (it == ranges.begin() || (char*)p >= (--it)->first + it->second.size) return false;
  if (device) *device = it->second.device;
  return true;
}
static bool reserve(void** p, size_t n) {  // addresses only, no memory of the host
  *p = mmap(nullptr, n, keeps_copies() ? PROT_READ | PROT_WRITE : PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*p == MAP_FAILED) return false;
  device_memory[(char*)*p] = {n, current};
  return true;
}
static bool take(size_t n, int device) { counts[MALLOCS]++; return used[device] + n <= capacity() && (used[device] += n, true); }
static void give_back(Range r) { counts[FREES]++; used[r.device] -= r.size; }
cudaError_t cudaMalloc(void** p, size_t n) {
  touch("cudaMalloc");
  Hold h(memory_lock);
  return take(n, current) && reserve(p, n ? n : 1) ? cudaSuccess : cudaErrorMemoryAllocation;
}
static void unmap(void* p) { munmap(p, device_memory[(char*)p].size); device_memory.erase((char*)p); }
cudaError_t cudaFree(void* p) {
  Hold h(memory_lock);
  if (device_memory.count((char*)p)) { give_back(device_memory[(char*)p]); unmap(p); }
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* rest, size_t* total) OK(*total = capacity(); *rest = *total - used[current])
static Success pin(void* p, size_t n) OK(Hold h(memory_lock); pinned_memory[(char*)p] = {n, current})
static Success unpin(void* p) OK(Hold h(memory_lock); pinned_memory.erase((char*)p))
cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) { touch("cudaHostAlloc"); notify("cudaHostAlloc", n); return pin(*p = calloc(1, n), n); }
cudaError_t cudaFreeHost(void* p) OK(notify("cudaFreeHost"); unpin(p); free(p))
cudaError_t cudaHostRegister(void* p, size_t n, unsigned) { touch("cudaHostRegister"); notify("cudaHostRegister", n); return pin(p, n); }
cudaError_t cudaHostUnregister(void* p) { notify("cudaHostUnregister"); return unpin(p); }
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  memset(a, 0, sizeof *a);
  a->device = current;
  bool device = find(device_memory, p, &a->device);
  a->type = device ? cudaMemoryTypeDevice : find(pinned_memory, p) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}
static Success copy(const string& by, void* to, const void* from, size_t n) {
  bool to_device = find(device_memory, to), from_device = find(device_memory, from);
  if (to_device && from_device) return launch();
  const char* host = find(pinned_memory, to_device ? from : to) ? "pinned" : "pageable";
  if (to_device || from_device) notify(by + (to_device ? " H2D " : " D2H ") + host, n);
  if (keeps_copies() || (!to_device && !from_device)) memmove(to, from, n);
  else if (from_device) memset(to, 0, n);
  return {};
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind, cudaStream_t) { return copy("copy", to, from, n); }
cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind) { return copy("cudaMemcpy", to, from, n); }

// ------------------------------------------------------------------------------------------ driver and NVML

static int nothing(...) { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* found) {
  if (!(*f = dlsym(RTLD_DEFAULT, name))) *f = (void*)nothing;
  if (found) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
CUresult cuInit(unsigned) OK()
CUresult cuDriverGetVersion(int* v) OK(*v = CUDA_VERSION)
CUresult cuDeviceGetCount(int* n) OK(*n = n_devices())
CUresult cuDeviceGet(CUdevice* d, int i) OK(*d = i)
CUresult cuDeviceGetAttribute(int* v, CUdevice_attribute a, CUdevice d) OK(cudaDeviceGetAttribute(v, (cudaDeviceAttr)a, d))
CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned* flags, int* active) OK(*flags = 0; *active = has_context[d])
CUresult cuCtxGetCurrent(CUcontext* c) OK(*c = (CUcontext)0x20)
CUresult cuGetErrorString(CUresult, const char** s) OK(*s = "stub driver error")
// Libraries that link a runtime of their own (cuDNN, cuSOLVER, CUPTI) ask here, and find no GPU.
CUresult cuGetProcAddress(const char*, void** f, int, cuuint64_t, CUdriverProcAddressQueryResult*) { *f = nullptr; return CUDA_ERROR_NOT_FOUND; }
// Expandable segments of torch's allocator: what is created counts as used, what is reserved does not.
CUresult cuMemGetAllocationGranularity(size_t* n, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) OK(*n = 2 << 20)
CUresult cuMemAddressReserve(CUdeviceptr* p, size_t n, size_t, CUdeviceptr, unsigned long long) OK(Hold h(memory_lock); reserve((void**)p, n))
CUresult cuMemAddressFree(CUdeviceptr p, size_t) OK(Hold h(memory_lock); unmap((void*)p))
static std::map<CUmemGenericAllocationHandle, Range> created;
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t n, const CUmemAllocationProp* p, unsigned long long) {
  Hold h(memory_lock);
  if (!take(n, p->location.id)) return CUDA_ERROR_OUT_OF_MEMORY;
  created[*handle = (handles += 16)] = {n, p->location.id};
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) OK(Hold h(memory_lock); give_back(created[handle]); created.erase(handle))
// NVML, which torch asks for fabric handles and when memory is short.
int nvmlInit_v2() { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) OK(*device = nullptr)
int nvmlDeviceGetGpuFabricInfoV(...) { return 3; }
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* n, void*) OK(*n = 0)
int nvmlSystemGetCudaDriverVersion_v2(int* v) OK(*v = CUDA_VERSION)

// --------------------------------------------------------------------------------------------------- cuBLAS

cublasStatus_t cublasCreate(cublasHandle_t* h) { return handle(h, "cublasCreate"); }
cublasStatus_t cublasGetMathMode(cublasHandle_t, cublasMath_t* m) OK(*m = CUBLAS_DEFAULT_MATH)
cublasStatus_t cublasGetPointerMode(cublasHandle_t, cublasPointerMode_t* m) OK(*m = CUBLAS_POINTER_MODE_HOST)
size_t cublasLtGetVersion() { return CUBLAS_VERSION; }
static Success describe(void* d) { static char all[1024]; *(void**)d = all; return {}; }  // torch does not read them
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* d, cublasComputeType_t, cudaDataType_t) { return describe(d); }
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* p) { return describe(p); }
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* l, cudaDataType, uint64_t, uint64_t, int64_t) { return describe(l); }
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
                                              cublasLtMatmulHeuristicResult_t*, int* n) OK(*n = 1)

// ----------------------------------------------------------------------------------------------------- NCCL

struct Place { int size, rank; };
static std::mutex comm_lock;
static std::map<ncclComm_t, Place> comms;
static Place place(ncclComm_t c) { Hold h(comm_lock); return comms[c]; }
static Success join(ncclComm_t* c, int size, int rank, const char* by) {
  touch(by);
  notify(string(by) + " of " + to_string(size) + " ranks");
  Hold h(comm_lock);
  comms[*c = (ncclComm_t)malloc(64)] = {size, rank};
  return {};
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) OK(memset(id, 7, sizeof *id))
ncclResult_t ncclGetVersion(int* v) OK(*v = NCCL_VERSION_CODE)
ncclResult_t ncclCommInitRank(ncclComm_t* c, int n, ncclUniqueId, int rank) { return join(c, n, rank, "ncclCommInit"); }
ncclResult_t ncclCommInitRankConfig(ncclComm_t* c, int n, ncclUniqueId, int rank, ncclConfig_t*) { return join(c, n, rank, "ncclCommInit"); }
ncclResult_t ncclCommInitRankScalable(ncclComm_t* c, int n, int rank, int, ncclUniqueId*, ncclConfig_t*) { return join(c, n, rank, "ncclCommInit"); }
ncclResult_t ncclCommSplit(ncclComm_t, int, int key, ncclComm_t* c, ncclConfig_t*) { return join(c, 1, key, "ncclCommSplit, counted as one"); }
ncclResult_t ncclCommCount(ncclComm_t c, int* n) OK(*n = place(c).size)
ncclResult_t ncclCommUserRank(ncclComm_t c, int* n) OK(*n = place(c).rank)
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* e) OK(*e = ncclSuccess)
const char* ncclGetErrorString(ncclResult_t) { return "stub driver error"; }
const char* ncclGetLastError(ncclComm_t) { return ""; }

// Reports the bytes of this rank's input or output, whichever is larger. With `each`, n counts one rank's part of it.
static Success report_collective(const char* kind, size_t n, ncclDataType_t type, ncclComm_t c, bool each = false) {
  static const int sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};  // in the order of ncclDataType_t
  int size = place(c).size, item = type < 12 ? sizes[type] : 1;
  notify(string(kind) + " of " + to_string(size) + " ranks", n * item * (each ? size : 1));
  return {};
}
#define COLLECTIVE(name, each, ...) ncclResult_t name(__VA_ARGS__, ncclComm_t c, cudaStream_t) { return report_collective(#name, n, t, c, each); }
COLLECTIVE(ncclAllReduce, false, const void*, void*, size_t n, ncclDataType_t t, ncclRedOp_t)
COLLECTIVE(ncclAllGather, true, const void*, void*, size_t n, ncclDataType_t t)
COLLECTIVE(ncclReduceScatter, true, const void*, void*, size_t n, ncclDataType_t t, ncclRedOp_t)
COLLECTIVE(ncclAlltoAll, true, const void*, void*, size_t n, ncclDataType_t t)
COLLECTIVE(ncclBroadcast, false, const void*, void*, size_t n, ncclDataType_t t, int)
COLLECTIVE(ncclBcast, false, void*, size_t n, ncclDataType_t t, int)
COLLECTIVE(ncclReduce, false, const void*, void*, size_t n, ncclDataType_t t, ncclRedOp_t, int)
COLLECTIVE(ncclSend, false, const void*, size_t n, ncclDataType_t t, int)
COLLECTIVE(ncclRecv, false, void*, size_t n, ncclDataType_t t, int)
}
