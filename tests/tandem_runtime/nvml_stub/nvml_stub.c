/* Stands in for libnvidia-ml.so.1 on a machine with two cards; has the functions that tandem_runtime uses.
 *
 * Card 0 is shared with two foreign processes (4242 computes and draws, 4243 draws) and runs hot. Card 1 cannot tell its
 * power, nor how much memory its process holds.
 *
 *   NVML_STUB_OWN_PID       the process that is not foreign; "self" for the one that asks
 *   NVML_STUB_NO_DRIVER     nvmlInit fails
 *   NVML_STUB_LOSE          card 0 is lost from the second memory reading on, until NVML is started again
 *   NVML_STUB_XIDS          XID errors that wait in the driver, such as 0:79,1:48,0:79 (card:number)
 *   NVML_STUB_MIG           card 0 is in MIG mode: "1" has two instances, 3/0 and 4/0; "none" has none
 *   NVML_STUB_ALIKE         both cards have the same name
 *   NVML_STUB_THREADS       a call on the first thread of the process, where the event loop runs, aborts the process
 *   NVML_STUB_SCENE         a file, read at each call; without it the processes are as above. Its lines:
 *       process DEVICE PID MIB     uses a device (0, 1, 0/3/0, 0/4/0); "-" instead of MIB: the driver does not tell
 *       used DEVICE MIB            all memory in use
 *       hang                       no call returns while the line is there
 *
 * Card 0 counts its energy, 1,000 J more with each reading since NVML was started, and has ECC. Card 1 has neither.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15 };

typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned int gpu, memory; } utilization_t;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gpu_instance, compute_instance; } process_t;
typedef struct { int index, gpu_instance; const char *label, *name, *uuid; unsigned long long total, used, reserved; } dev_t_;
typedef const dev_t_ *device_t;

#define GIB (1024ULL * 1024 * 1024)
#define MIB (1024ULL * 1024)
#define NOT_AVAILABLE (~0ULL)
#define MAX_PROCESSES 16

static const dev_t_ devices[4] = {
    {0, -1, "0", "Stub A", "GPU-aaaaaaaa-0000-0000-0000-000000000000", 80 * GIB, 10 * GIB, 1 * GIB},
    {1, -1, "1", "Stub B", "GPU-bbbbbbbb-0000-0000-0000-000000000001", 24 * GIB, 1 * GIB, 0},
    {0, 3, "0/3/0", "Stub A MIG 3g.40gb", "MIG-cccccccc-0000-0000-0000-000000000003", 40 * GIB, 4 * GIB, 0},
    {0, 4, "0/4/0", "Stub A MIG 3g.40gb", "MIG-dddddddd-0000-0000-0000-000000000004", 40 * GIB, 8 * GIB, 0},
};
static int num_memory_readings, num_energy_readings;
int stub_num_starts;
int stub_num_shutdowns;

static int has_line(const char *word) {
    const char *path = getenv("NVML_STUB_SCENE");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[256];
    int found = 0;
    while (file && !found && fgets(line, sizeof line, file)) found = !strncmp(line, word, strlen(word));
    if (file) fclose(file);
    return found;
}

/* Every call of the interface begins here. */
static void enter(void) {
    if (getenv("NVML_STUB_THREADS") && syscall(SYS_gettid) == getpid()) {
        fputs("NVML was called on the thread of the event loop\n", stderr);
        abort();
    }
    while (has_line("hang")) usleep(5000);
}

static int is_mig(device_t device) { return device->gpu_instance >= 0; }

int nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    enter();
    if (getenv("NVML_STUB_NO_DRIVER")) return DRIVER_NOT_LOADED;
    stub_num_starts++;
    num_memory_readings = num_energy_readings = 0;
    return OK;
}

static int is_started(void) { return stub_num_starts > stub_num_shutdowns; }

int nvmlShutdown(void) {
    enter();
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

int nvmlSystemGetDriverVersion(char *version, unsigned int size) {
    enter();
    return snprintf(version, size, "999.1") < (int)size ? OK : INSUFFICIENT_SIZE;
}

int nvmlDeviceGetCount_v2(unsigned int *count) {
    enter();
    if (!is_started()) return UNINITIALIZED;
    *count = 2;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, device_t *device) {
    enter();
    if (!is_started()) return UNINITIALIZED;
    if (index > 1) return INVALID_ARGUMENT;
    *device = &devices[index];
    return OK;
}

static int copy(char *to, unsigned int size, const char *text) {
    if (strlen(text) + 1 > size) return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return OK;
}

int nvmlDeviceGetName(device_t device, char *name, unsigned int size) {
    enter();
    return copy(name, size, getenv("NVML_STUB_ALIKE") ? "Stub" : device->name);
}

int nvmlDeviceGetUUID(device_t device, char *uuid, unsigned int size) {
    enter();
    return copy(uuid, size, device->uuid);
}

static unsigned long long used_of(device_t device) {
    const char *path = getenv("NVML_STUB_SCENE");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[256], label[32];
    unsigned long long mib, used = device->used;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "used %31s %llu", label, &mib) == 2 && !strcmp(label, device->label)) used = mib * MIB;
    if (file) fclose(file);
    return used;
}

int nvmlDeviceGetMemoryInfo(device_t device, memory_t *memory) {
    enter();
    if (device == devices && getenv("NVML_STUB_LOSE") && stub_num_starts == 1 && num_memory_readings++ > 0) return GPU_IS_LOST;
    memory->total = device->total;
    memory->used = used_of(device);
    memory->free = memory->total - memory->used;
    return OK;
}

#ifndef NVML_STUB_OLD_DRIVER
int nvmlDeviceGetMemoryInfo_v2(device_t device, memory_v2_t *memory) {
    enter();
    if (memory->version != (sizeof(memory_v2_t) | 2 << 24)) return INVALID_ARGUMENT;
    memory->total = device->total;
    memory->reserved = device->reserved;
    memory->used = used_of(device);
    memory->free = memory->total - memory->used;
    return OK;
}
#endif

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

static int scene_of(device_t device, FILE *file, unsigned int *size, process_t *processes) {
    process_t found[MAX_PROCESSES];
    unsigned int num = 0, pid;
    char line[256], label[32], mib[32];
    while (num < MAX_PROCESSES && fgets(line, sizeof line, file)) {
        if (sscanf(line, "process %31s %u %31s", label, &pid, mib) != 3 || strcmp(label, device->label)) continue;
        found[num++] = (process_t){pid, *mib == '-' ? NOT_AVAILABLE : strtoull(mib, NULL, 10) * MIB, 0, 0};
    }
    fclose(file);
    return give(found, num, size, processes);
}

int nvmlDeviceGetComputeRunningProcesses_v3(device_t device, unsigned int *size, process_t *processes) {
    process_t on_a[2] = {{own_pid(), 3 * GIB, 0, 0}, {4242, 5 * GIB, 0, 0}};
    process_t on_b[1] = {{own_pid(), NOT_AVAILABLE, 0, 0}};
    process_t on_instance[1] = {{own_pid(), 4 * GIB, 3, 0}};
    enter();
    const char *path = getenv("NVML_STUB_SCENE");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (file) return scene_of(device, file, size, processes);
    if (is_mig(device)) return give(on_instance, device->gpu_instance == 3, size, processes);
    return device->index ? give(on_b, 1, size, processes) : give(on_a, 2, size, processes);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(device_t device, unsigned int *size, process_t *processes) {
    process_t on_a[2] = {{4242, 5 * GIB, 0, 0}, {4243, 1 * GIB, 0, 0}};
    enter();
    if (is_mig(device)) return NOT_SUPPORTED;
    return device->index || getenv("NVML_STUB_SCENE") ? give(NULL, 0, size, processes) : give(on_a, 2, size, processes);
}

int nvmlDeviceGetUtilizationRates(device_t device, utilization_t *rates) {
    enter();
    if (is_mig(device)) return NOT_SUPPORTED;
    rates->gpu = device->index ? 0 : 97;
    rates->memory = 40;
    return OK;
}

int nvmlDeviceGetTemperature(device_t device, int sensor, unsigned int *celsius) {
    enter();
    if (sensor != 0 || is_mig(device)) return INVALID_ARGUMENT;
    *celsius = device->index ? 31 : 84;
    return OK;
}

int nvmlDeviceGetPowerUsage(device_t device, unsigned int *milliwatts) {
    enter();
    if (device->index || is_mig(device)) return NOT_SUPPORTED;
    *milliwatts = 345678;
    return OK;
}

static int reasons_of(device_t device, unsigned long long *reasons) {
    enter();
    if (is_mig(device)) return INVALID_ARGUMENT;
    *reasons = device->index ? 0x1 : 0x4 | 0x40 | 0x8000; /* idle; power cap, hot, and one no header names yet */
    return OK;
}

int nvmlDeviceGetTotalEnergyConsumption(device_t device, unsigned long long *millijoules) {
    enter();
    if (device->index || is_mig(device)) return NOT_SUPPORTED;
    *millijoules = 5000000 + 1000000ULL * num_energy_readings++;
    return OK;
}

int nvmlDeviceGetTotalEccErrors(device_t device, int kind, int since, unsigned long long *count) {
    enter();
    if (device->index || is_mig(device)) return NOT_SUPPORTED;
    if (since != 0) return INVALID_ARGUMENT;
    *count = kind ? 1 : 12;
    return OK;
}

int nvmlDeviceGetIndex(device_t device, unsigned int *index) {
    enter();
    *index = (unsigned int)device->index;
    return OK;
}

int nvmlDeviceGetMigMode(device_t device, unsigned int *current, unsigned int *pending) {
    enter();
    if (device->index || is_mig(device)) return NOT_SUPPORTED;
    *current = *pending = getenv("NVML_STUB_MIG") != NULL;
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(device_t device, unsigned int *count) {
    enter();
    *count = device->index ? 0 : 7;
    return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(device_t device, unsigned int place, device_t *instance) {
    enter();
    if (device->index || place > 6) return INVALID_ARGUMENT;
    const char *mode = getenv("NVML_STUB_MIG");
    if (!mode || !strcmp(mode, "none") || place == 0 || place > 2) return NOT_FOUND; /* place 0 is empty */
    *instance = &devices[1 + place];
    return OK;
}

int nvmlDeviceGetGpuInstanceId(device_t device, unsigned int *id) {
    enter();
    *id = (unsigned int)device->gpu_instance;
    return is_mig(device) ? OK : NOT_SUPPORTED;
}

int nvmlDeviceGetComputeInstanceId(device_t device, unsigned int *id) {
    enter();
    *id = 0;
    return is_mig(device) ? OK : NOT_SUPPORTED;
}

typedef struct { device_t device; unsigned long long kind, data; unsigned int gpu_instance, compute_instance; } event_t;
typedef unsigned long long *event_set_t; /* which cards are registered, as bits */

static unsigned long long registered;
static const char *xids_left;

int nvmlEventSetCreate(event_set_t *set) {
    enter();
    registered = 0;
    if (!xids_left) xids_left = getenv("NVML_STUB_XIDS");
    *set = &registered;
    return OK;
}

int nvmlEventSetFree(event_set_t set) {
    enter();
    *set = 0;
    return OK;
}

int nvmlDeviceRegisterEvents(device_t device, unsigned long long kinds, event_set_t set) {
    enter();
    if (kinds != 8) return INVALID_ARGUMENT; /* XID errors */
    *set |= 1ULL << device->index;
    return OK;
}

int nvmlEventSetWait_v2(event_set_t set, event_t *event, unsigned int timeout_ms) {
    enter();
    if (timeout_ms) return INVALID_ARGUMENT; /* nobody may wait here */
    if (!xids_left || !*xids_left) return TIMEOUT;
    char *end;
    int card = (int)strtol(xids_left, &end, 10);
    event->data = strtoull(end + 1, &end, 10);
    xids_left = *end ? end + 1 : end;
    if (!(*set >> card & 1)) return INVALID_ARGUMENT;
    event->device = &devices[card];
    event->kind = 8;
    return OK;
}

#ifdef NVML_STUB_OLD_DRIVER
int nvmlDeviceGetCurrentClocksThrottleReasons(device_t device, unsigned long long *reasons) { return reasons_of(device, reasons); }
#else
int nvmlDeviceGetCurrentClocksEventReasons(device_t device, unsigned long long *reasons) { return reasons_of(device, reasons); }
#endif
