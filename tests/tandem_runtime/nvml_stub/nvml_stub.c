/* What would NVML say on a machine with two cards? A stand-in for libnvidia-ml.so.1 with the functions tandem_runtime/nvml.py uses.
 *
 * Card 0 is shared with two foreign processes (4242 computes and draws, 4243 draws) and runs hot. Card 1 cannot tell its
 * power, nor how much memory its process holds.
 *
 *   NVML_STUB_OWN_PID       the process that is not foreign; "self" for the one that asks
 *   NVML_STUB_NO_DRIVER     nvmlInit fails
 *   NVML_STUB_LOSE          card 0 is lost from the second memory reading on, until NVML is started again
 *   NVML_STUB_XIDS          XID errors that wait in the driver, such as 0:79,1:48,0:79 (card:number)
 *
 * Card 0 counts its energy, 1,000 J more with each reading since NVML was started, and has ECC. Card 1 has neither.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15 };

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned int gpu, memory; } utilization_t;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gpu_instance, compute_instance; } process_t;
typedef const int *device_t;

#define GIB (1024ULL * 1024 * 1024)
#define NOT_AVAILABLE (~0ULL)

static const int indices[2] = {0, 1};
static int num_memory_readings, num_energy_readings;
int stub_num_starts;
int stub_num_shutdowns;

int nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    if (getenv("NVML_STUB_NO_DRIVER")) return DRIVER_NOT_LOADED;
    stub_num_starts++;
    num_memory_readings = num_energy_readings = 0;
    return OK;
}

static int is_started(void) { return stub_num_starts > stub_num_shutdowns; }

int nvmlShutdown(void) {
    if (!is_started()) return UNINITIALIZED;
    stub_num_shutdowns++;
    return OK;
}

const char *nvmlErrorString(int code) {
    switch (code) {
    case NOT_SUPPORTED: return "Not Supported";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case GPU_IS_LOST: return "GPU is lost";
    default: return "Another error";
    }
}

int nvmlDeviceGetCount_v2(unsigned int *count) {
    if (!is_started()) return UNINITIALIZED;
    *count = 2;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, device_t *device) {
    if (!is_started()) return UNINITIALIZED;
    if (index > 1) return INVALID_ARGUMENT;
    *device = &indices[index];
    return OK;
}

static int copy(char *to, unsigned int size, const char *text) {
    if (strlen(text) + 1 > size) return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return OK;
}

int nvmlDeviceGetName(device_t device, char *name, unsigned int size) {
    return copy(name, size, *device ? "Stub B" : "Stub A");
}

int nvmlDeviceGetUUID(device_t device, char *uuid, unsigned int size) {
    return copy(uuid, size, *device ? "GPU-bbbbbbbb-0000-0000-0000-000000000001" : "GPU-aaaaaaaa-0000-0000-0000-000000000000");
}

int nvmlDeviceGetMemoryInfo(device_t device, memory_t *memory) {
    if (*device == 0 && getenv("NVML_STUB_LOSE") && stub_num_starts == 1 && num_memory_readings++ > 0) return GPU_IS_LOST;
    memory->total = *device ? 24 * GIB : 80 * GIB;
    memory->used = *device ? 1 * GIB : 10 * GIB;
    memory->free = memory->total - memory->used;
    return OK;
}

static unsigned int own_pid(void) {
    const char *text = getenv("NVML_STUB_OWN_PID");
    if (text && !strcmp(text, "self")) return (unsigned int)getpid();
    return text ? (unsigned int)atoi(text) : 0;
}

static int give(const process_t *from, unsigned int num, unsigned int *size, process_t *to) {
    unsigned int room = *size;
    *size = num;
    if (room < num || !to) return num ? INSUFFICIENT_SIZE : OK;
    memcpy(to, from, num * sizeof(process_t));
    return OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(device_t device, unsigned int *size, process_t *processes) {
    process_t on_a[2] = {{own_pid(), 3 * GIB, 0, 0}, {4242, 5 * GIB, 0, 0}};
    process_t on_b[1] = {{own_pid(), NOT_AVAILABLE, 0, 0}};
    return *device ? give(on_b, 1, size, processes) : give(on_a, 2, size, processes);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(device_t device, unsigned int *size, process_t *processes) {
    process_t on_a[2] = {{4242, 5 * GIB, 0, 0}, {4243, 1 * GIB, 0, 0}};
    return *device ? give(NULL, 0, size, processes) : give(on_a, 2, size, processes);
}

int nvmlDeviceGetUtilizationRates(device_t device, utilization_t *rates) {
    rates->gpu = *device ? 0 : 97;
    rates->memory = 40;
    return OK;
}

int nvmlDeviceGetTemperature(device_t device, int sensor, unsigned int *celsius) {
    if (sensor != 0) return INVALID_ARGUMENT;
    *celsius = *device ? 31 : 84;
    return OK;
}

int nvmlDeviceGetPowerUsage(device_t device, unsigned int *milliwatts) {
    if (*device) return NOT_SUPPORTED;
    *milliwatts = 345678;
    return OK;
}

static int reasons_of(device_t device, unsigned long long *reasons) {
    *reasons = *device ? 0x1 : 0x4 | 0x40 | 0x8000; /* idle; power cap, hot, and one no header names yet */
    return OK;
}

int nvmlDeviceGetTotalEnergyConsumption(device_t device, unsigned long long *millijoules) {
    if (*device) return NOT_SUPPORTED;
    *millijoules = 5000000 + 1000000ULL * num_energy_readings++;
    return OK;
}

int nvmlDeviceGetTotalEccErrors(device_t device, int kind, int since, unsigned long long *count) {
    if (*device) return NOT_SUPPORTED;
    if (since != 0) return INVALID_ARGUMENT;
    *count = kind ? 1 : 12;
    return OK;
}

int nvmlDeviceGetIndex(device_t device, unsigned int *index) {
    *index = (unsigned int)*device;
    return OK;
}

typedef struct { device_t device; unsigned long long kind, data; unsigned int gpu_instance, compute_instance; } event_t;
typedef unsigned long long *event_set_t; /* which cards are registered, as bits */

static unsigned long long registered;
static const char *xids_left;

int nvmlEventSetCreate(event_set_t *set) {
    registered = 0;
    if (!xids_left) xids_left = getenv("NVML_STUB_XIDS");
    *set = &registered;
    return OK;
}

int nvmlEventSetFree(event_set_t set) {
    *set = 0;
    return OK;
}

int nvmlDeviceRegisterEvents(device_t device, unsigned long long kinds, event_set_t set) {
    if (kinds != 8) return INVALID_ARGUMENT; /* XID errors */
    *set |= 1ULL << *device;
    return OK;
}

int nvmlEventSetWait_v2(event_set_t set, event_t *event, unsigned int timeout_ms) {
    if (timeout_ms) return INVALID_ARGUMENT; /* nobody may wait here */
    if (!xids_left || !*xids_left) return TIMEOUT;
    char *end;
    int card = (int)strtol(xids_left, &end, 10);
    event->data = strtoull(end + 1, &end, 10);
    xids_left = *end ? end + 1 : end;
    if (!(*set >> card & 1)) return INVALID_ARGUMENT;
    event->device = &indices[card];
    event->kind = 8;
    return OK;
}

#ifdef NVML_STUB_OLD_DRIVER
int nvmlDeviceGetCurrentClocksThrottleReasons(device_t device, unsigned long long *reasons) { return reasons_of(device, reasons); }
#else
int nvmlDeviceGetCurrentClocksEventReasons(device_t device, unsigned long long *reasons) { return reasons_of(device, reasons); }
#endif
