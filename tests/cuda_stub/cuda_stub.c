/* A stand-in for libcuda.so.1: the calls of tandem_engine/execution/cuda_vmm.py over memfds and mmap.
 *
 * "Device memory" is a memfd; a mapped address is an address of this process, so a CPU engine can compute in it. What
 * the stub keeps of the driver's behaviour: sizes and addresses are multiples of the granularity; memory lives while a
 * handle, a mapping or a descriptor of it does; mapped memory cannot be touched before cuMemSetAccess; calls on memory
 * need a current context on their thread; a descriptor that is not of this driver is refused.
 *
 *   CUDA_STUB_NO_DEVICE      cuInit fails
 *   CUDA_STUB_NO_EXPORT      the device cannot export memory as descriptors
 *   CUDA_STUB_NO_READ_ONLY   memory of another process cannot be mapped read-only
 *   CUDA_STUB_BYTES          memory of the device: more is not given to this process
 *   CUDA_STUB_COPY_USEC      microseconds that a copy waits after each 4 KiB: long enough to be caught in the middle
 *
 * Where NVIDIA's header is installed the stub is compiled against it, and the compiler compares every signature.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <pthread.h>

#ifdef WITH_NVIDIA_HEADER
#include <cuda.h>
#else
#define CUDAAPI
#define cuMemcpyDtoHAsync cuMemcpyDtoHAsync_v2
#define cuMemcpyDtoDAsync cuMemcpyDtoDAsync_v2
#define cuStreamDestroy cuStreamDestroy_v2
typedef int CUdevice;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef enum { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_OUT_OF_MEMORY = 2, CUDA_ERROR_NOT_INITIALIZED = 3, CUDA_ERROR_NO_DEVICE = 100, CUDA_ERROR_INVALID_DEVICE = 101, CUDA_ERROR_INVALID_CONTEXT = 201, CUDA_ERROR_INVALID_HANDLE = 400, CUDA_ERROR_NOT_SUPPORTED = 801 } CUresult;
typedef enum { CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103 } CUdevice_attribute;
typedef enum { CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1 } CUmemAllocationHandleType;
typedef enum { CU_MEM_ALLOCATION_TYPE_PINNED = 1 } CUmemAllocationType;
typedef enum { CU_MEM_LOCATION_TYPE_DEVICE = 1 } CUmemLocationType;
typedef enum { CU_MEM_ACCESS_FLAGS_PROT_READ = 1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3 } CUmemAccess_flags;
typedef enum { CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0 } CUmemAllocationGranularity_flags;
typedef struct { CUmemLocationType type; int id; } CUmemLocation;
typedef struct { CUmemAllocationType type; CUmemAllocationHandleType requestedHandleTypes; CUmemLocation location; void *win32HandleMetaData; struct { unsigned char compressionType, gpuDirectRDMACapable; unsigned short usage; unsigned char reserved[4]; } allocFlags; } CUmemAllocationProp;
typedef struct { CUmemLocation location; CUmemAccess_flags flags; } CUmemAccessDesc;
#endif

#define GRANULARITY ((size_t)2 << 20)
#define NUM_ENTRIES 4096
#define PIECE 4096

typedef struct { int fd; size_t size; int is_imported; } memory_t;
typedef struct { CUdeviceptr address; size_t size; memory_t *mapped; } range_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int is_initialized, num_contexts, num_streams;
static memory_t *handles[NUM_ENTRIES];
static range_t ranges[NUM_ENTRIES];
static size_t allocated;
static __thread CUcontext current;

/* What tests ask: memory of this library is memory of the process; and what is still held. */
int tandem_stub_host_addressable(void) { return 1; }
int tandem_stub_num_held(int kind) {
    int num_handles = 0, num_ranges = 0;
    for (int i = 0; i < NUM_ENTRIES; i++) num_handles += handles[i] != NULL, num_ranges += ranges[i].size != 0;
    return kind == 0 ? num_handles : kind == 1 ? num_ranges : num_streams;
}

static CUresult ready(void) {
    if (!is_initialized) return CUDA_ERROR_NOT_INITIALIZED;
    return current ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult CUDAAPI cuInit(unsigned int flags) {
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    if (getenv("CUDA_STUB_NO_DEVICE")) return CUDA_ERROR_NO_DEVICE;
    is_initialized = 1;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGetErrorName(CUresult error, const char **name) {
    switch (error) {
    case CUDA_SUCCESS: *name = "CUDA_SUCCESS"; break;
    case CUDA_ERROR_INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; break;
    case CUDA_ERROR_OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case CUDA_ERROR_NOT_INITIALIZED: *name = "CUDA_ERROR_NOT_INITIALIZED"; break;
    case CUDA_ERROR_NO_DEVICE: *name = "CUDA_ERROR_NO_DEVICE"; break;
    case CUDA_ERROR_INVALID_DEVICE: *name = "CUDA_ERROR_INVALID_DEVICE"; break;
    case CUDA_ERROR_INVALID_CONTEXT: *name = "CUDA_ERROR_INVALID_CONTEXT"; break;
    case CUDA_ERROR_INVALID_HANDLE: *name = "CUDA_ERROR_INVALID_HANDLE"; break;
    case CUDA_ERROR_NOT_SUPPORTED: *name = "CUDA_ERROR_NOT_SUPPORTED"; break;
    default: *name = NULL; return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGet(CUdevice *device, int ordinal) {
    if (!is_initialized) return CUDA_ERROR_NOT_INITIALIZED;
    if (ordinal != 0) return CUDA_ERROR_INVALID_DEVICE;
    *device = 0;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    if (!is_initialized) return CUDA_ERROR_NOT_INITIALIZED;
    if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
    *value = attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED ||
             (attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED && !getenv("CUDA_STUB_NO_EXPORT"));
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    if (!is_initialized) return CUDA_ERROR_NOT_INITIALIZED;
    if (device != 0) return CUDA_ERROR_INVALID_DEVICE;
    num_contexts++;
    *context = (CUcontext)&num_contexts;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSetCurrent(CUcontext context) {
    if (!is_initialized) return CUDA_ERROR_NOT_INITIALIZED;
    if (context && context != (CUcontext)&num_contexts) return CUDA_ERROR_INVALID_CONTEXT;
    current = context;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags option) {
    (void)option;
    if (!is_initialized) return CUDA_ERROR_NOT_INITIALIZED;
    if (prop->type != CU_MEM_ALLOCATION_TYPE_PINNED || prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
    *granularity = GRANULARITY;
    return CUDA_SUCCESS;
}

static CUresult keep(int fd, size_t size, int is_imported, CUmemGenericAllocationHandle *handle) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < NUM_ENTRIES; i++) {
        if (handles[i]) continue;
        memory_t *memory = malloc(sizeof *memory);
        *memory = (memory_t){fd, size, is_imported};
        handles[i] = memory;
        allocated += is_imported ? 0 : size;
        *handle = i + 1;
        pthread_mutex_unlock(&lock);
        return CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    close(fd);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static memory_t *of(CUmemGenericAllocationHandle handle) {
    return handle >= 1 && handle <= NUM_ENTRIES ? handles[handle - 1] : NULL;
}

CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop, unsigned long long flags) {
    if (ready()) return ready();
    if (flags || !size || size % GRANULARITY || prop->location.id != 0) return CUDA_ERROR_INVALID_VALUE;
    if (prop->type != CU_MEM_ALLOCATION_TYPE_PINNED || prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_INVALID_VALUE;
    if (prop->requestedHandleTypes != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || getenv("CUDA_STUB_NO_EXPORT")) return CUDA_ERROR_NOT_SUPPORTED;
    const char *limit = getenv("CUDA_STUB_BYTES");
    if (limit && allocated + size > strtoull(limit, NULL, 10)) return CUDA_ERROR_OUT_OF_MEMORY;
    int fd = memfd_create("cuda-stub", MFD_CLOEXEC);
    if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
    if (ftruncate(fd, size)) { close(fd); return CUDA_ERROR_OUT_OF_MEMORY; }
    return keep(fd, size, 0, handle);
}

CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
    pthread_mutex_lock(&lock);
    memory_t *memory = of(handle);
    if (!memory) { pthread_mutex_unlock(&lock); return CUDA_ERROR_INVALID_HANDLE; }
    handles[handle - 1] = NULL;
    allocated -= memory->is_imported ? 0 : memory->size;
    for (int i = 0; i < NUM_ENTRIES; i++) if (ranges[i].mapped == memory) ranges[i].mapped = (memory_t *)1; /* the mapping lives on */
    pthread_mutex_unlock(&lock);
    close(memory->fd);
    free(memory);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags) {
    memory_t *memory = of(handle);
    if (!memory) return CUDA_ERROR_INVALID_HANDLE;
    if (flags || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
    int fd = dup(memory->fd);
    if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
    *(int *)shareable = fd;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *os_handle, CUmemAllocationHandleType type) {
    if (ready()) return ready();
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
    char path[64], target[64] = "";
    snprintf(path, sizeof path, "/proc/self/fd/%d", (int)(intptr_t)os_handle);
    if (readlink(path, target, sizeof target - 1) < 0 || strncmp(target, "/memfd:cuda-stub", 16)) return CUDA_ERROR_INVALID_VALUE;
    struct stat found;
    int fd = dup((int)(intptr_t)os_handle);
    if (fd < 0 || fstat(fd, &found)) return CUDA_ERROR_OUT_OF_MEMORY;
    return keep(fd, found.st_size, 1, handle);
}

CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wanted, unsigned long long flags) {
    if (ready()) return ready();
    if (flags || wanted || alignment || !size || size % GRANULARITY) return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < NUM_ENTRIES; i++) {
        if (ranges[i].size) continue;
        void *found = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (found == MAP_FAILED) break;
        ranges[i] = (range_t){(CUdeviceptr)(uintptr_t)found, size, NULL};
        *address = ranges[i].address;
        pthread_mutex_unlock(&lock);
        return CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static range_t *range_of(CUdeviceptr address, size_t size) {
    for (int i = 0; i < NUM_ENTRIES; i++) if (ranges[i].size == size && ranges[i].address == address && size) return &ranges[i];
    return NULL;
}

CUresult CUDAAPI cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
    memory_t *memory = of(handle);
    range_t *range = range_of(address, size);
    if (!memory) return CUDA_ERROR_INVALID_HANDLE;
    if (flags || offset || !range || range->mapped || size > memory->size) return CUDA_ERROR_INVALID_VALUE;
    if (mmap((void *)(uintptr_t)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->fd, 0) == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    range->mapped = memory;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *desc, size_t count) {
    range_t *range = range_of(address, size);
    if (count != 1 || desc->location.type != CU_MEM_LOCATION_TYPE_DEVICE || desc->location.id != 0 || !range || !range->mapped) return CUDA_ERROR_INVALID_VALUE;
    if (desc->flags == CU_MEM_ACCESS_FLAGS_PROT_READ && getenv("CUDA_STUB_NO_READ_ONLY")) return CUDA_ERROR_NOT_SUPPORTED;
    int protection = desc->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_READ | PROT_WRITE : PROT_READ;
    return mprotect((void *)(uintptr_t)address, size, protection) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemUnmap(CUdeviceptr address, size_t size) {
    range_t *range = range_of(address, size);
    if (!range || !range->mapped) return CUDA_ERROR_INVALID_VALUE;
    if (mmap((void *)(uintptr_t)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) return CUDA_ERROR_INVALID_VALUE;
    range->mapped = NULL;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAddressFree(CUdeviceptr address, size_t size) {
    range_t *range = range_of(address, size);
    if (!range || range->mapped) return CUDA_ERROR_INVALID_VALUE;
    munmap((void *)(uintptr_t)address, size);
    range->size = 0;
    return CUDA_SUCCESS;
}

static CUresult copy(void *into, const void *from, size_t size) {
    if (ready()) return ready();
    const char *pause = getenv("CUDA_STUB_COPY_USEC");
    if (!pause) { memcpy(into, from, size); return CUDA_SUCCESS; }
    for (size_t done = 0; done < size; done += PIECE) {
        memcpy((char *)into + done, (const char *)from + done, size - done < PIECE ? size - done : PIECE);
        usleep(atoi(pause));
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemcpyDtoDAsync(CUdeviceptr into, CUdeviceptr from, size_t size, CUstream stream) { (void)stream; return copy((void *)(uintptr_t)into, (void *)(uintptr_t)from, size); }
CUresult CUDAAPI cuMemcpyDtoHAsync(void *into, CUdeviceptr from, size_t size, CUstream stream) { (void)stream; return copy(into, (void *)(uintptr_t)from, size); }

CUresult CUDAAPI cuStreamCreate(CUstream *stream, unsigned int flags) {
    if (ready()) return ready();
    if (flags > 1) return CUDA_ERROR_INVALID_VALUE;
    num_streams++;
    *stream = (CUstream)&num_streams;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamSynchronize(CUstream stream) { (void)stream; return ready(); }
CUresult CUDAAPI cuStreamDestroy(CUstream stream) { (void)stream; num_streams--; return CUDA_SUCCESS; }
