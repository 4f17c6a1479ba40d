/* A libnvidia-ml.so.1 that answers what a shared file tells it to: the ABI, units and failures of NVML without a driver.

   Every function answers with the return code in its slot of the file named by FAKE_NVML, and with values from other slots.
   tests/fake_nvml/__init__.py owns the order of the slots and passes it as -DS_<name>=<place>. */

#include "../fake_gpus/slots.h"

typedef int nvmlReturn_t;
typedef void *nvmlDevice_t;
enum { UNINITIALIZED = 1, INVALID = 2, UNSUPPORTED = 3, NOT_FOUND = 6, LOST = 15, UNKNOWN = 999 };

static int load(void) { return load_slots("FAKE_NVML"); }

/* A handle is a number: 0x1000 + GPU, or 0x2000 + 16 * GPU + instance. */
static int gpu_of(nvmlDevice_t device) {
    uintptr_t number = (uintptr_t)device;
    if (number >= 0x2000 && number < 0x3000) return (int)(number - 0x2000) / 16;
    if (number >= 0x1000 && number < 0x2000) return (int)(number - 0x1000);
    return -1;
}
static int instance_of(nvmlDevice_t device) {
    uintptr_t number = (uintptr_t)device;
    return number >= 0x2000 ? (int)(number - 0x2000) % 16 : -1;
}

static int begin(nvmlDevice_t device, int64_t code) {
    if (!slots) return UNINITIALIZED;
    if (gpu_of(device) < 0) return INVALID;
    if (VALUE(lost) == gpu_of(device) + 1) return LOST;
    return (int)code;
}
#define BEGIN(device, name)                             \
    {                                                   \
        int code = load() ? begin(device, VALUE(ret_##name)) : UNKNOWN; \
        if (code) return code;                          \
    }
/* What a MIG instance does not answer. */
#define WHOLE(device) \
    if (instance_of(device) >= 0) return UNSUPPORTED;

nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    if (!load()) return UNKNOWN;
    VALUE(inits)++;
    return (int)VALUE(ret_init);
}
nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
nvmlReturn_t nvmlShutdown(void) {
    if (!load()) return UNKNOWN;
    VALUE(shutdowns)++;
    return 0;
}
const char *nvmlErrorString(nvmlReturn_t code) {
    (void)code;
    return "an error of the fake library";
}
nvmlReturn_t nvmlSystemGetDriverVersion(char *out, unsigned size) {
    if (!load()) return UNKNOWN;
    put_text(out, size, "570.12.34");
    return (int)VALUE(ret_driver);
}
nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    if (!load()) return UNKNOWN;
    *version = (int)VALUE(cuda);
    return (int)VALUE(ret_driver);
}
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
    if (!load()) return UNKNOWN;
    *count = (unsigned)VALUE(count);
    return (int)VALUE(ret_count);
}
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    if (!load()) return UNKNOWN;
    if (index >= (unsigned)VALUE(count) || index >= 64) return INVALID;
    if (VALUE(unreachable) == (int64_t)index + 1) return LOST;
    *device = (nvmlDevice_t)(uintptr_t)(0x1000 + index);
    return (int)VALUE(ret_handle);
}
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *out, unsigned size) {
    char name[64];
    BEGIN(device, name)
    snprintf(name, sizeof name, instance_of(device) >= 0 ? "Fake H200 MIG 1g.18gb" : gpu_of(device) == VALUE(other) - 1 ? "Fake T4" : "Fake H200");
    put_text(out, size, name);
    return 0;
}
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *out, unsigned size) {
    char uuid[64];
    BEGIN(device, uuid)
    if (instance_of(device) >= 0)
        snprintf(uuid, sizeof uuid, "MIG-%04d%04d-0000-0000-0000-000000000000", gpu_of(device), instance_of(device));
    else
        snprintf(uuid, sizeof uuid, "GPU-%08d-0000-0000-0000-000000000000", gpu_of(device));
    put_text(out, size, uuid);
    return 0;
}

typedef struct { unsigned long long total, free, used; } memory_v1;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2;
#define KEPT (512ull << 20)

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, memory_v1 *memory) {
    BEGIN(device, memory_v1)
    memory->total = (unsigned long long)VALUE(memory_total);
    memory->used = (unsigned long long)VALUE(memory_used) + KEPT;
    memory->free = memory->total - memory->used;
    return 0;
}
#ifndef NO_MEMORY_V2
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, memory_v2 *memory) {
    BEGIN(device, memory)
    if (memory->version != (sizeof *memory | 2u << 24)) return 25;
    memory->total = (unsigned long long)VALUE(memory_total);
    memory->used = (unsigned long long)VALUE(memory_used) + ((unsigned long long)gpu_of(device) << 20);
    memory->reserved = KEPT;
    memory->free = memory->total - memory->used - KEPT;
    return 0;
}
#endif

typedef struct { unsigned pid; unsigned long long used; unsigned gpu, compute; } process_t;

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, process_t *out) {
    BEGIN(device, processes)
    unsigned most = *count;
    *count = VALUE(process) ? 1 : 0;
    if (!*count) return 0;
    if (!out || most < *count) return 7;
    out[0] = (process_t){(unsigned)VALUE(process), (unsigned long long)VALUE(process_memory), ~0u, ~0u};
    return 0;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, unsigned *rates) {
    BEGIN(device, utilisation)
    WHOLE(device)
    rates[0] = (unsigned)VALUE(utilisation);
    rates[1] = 1;
    return 0;
}
nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned *power) {
    BEGIN(device, power)
    WHOLE(device)
    *power = (unsigned)VALUE(power);
    return 0;
}
nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *energy) {
    BEGIN(device, energy)
    WHOLE(device)
    *energy = (unsigned long long)VALUE(energy);
    return 0;
}
nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, unsigned *value) {
    BEGIN(device, temperature)
    WHOLE(device)
    if (sensor) return INVALID;
    *value = (unsigned)VALUE(temperature);
    return 0;
}
#ifndef NO_TEMPERATURE_V
typedef struct { unsigned version; int sensor; int value; } temperature_v1;
nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, temperature_v1 *asked) {
    BEGIN(device, temperature_v)
    WHOLE(device)
    if (asked->version != (sizeof *asked | 1u << 24)) return 25;
    asked->value = (int)VALUE(temperature);
    return 0;
}
#endif
nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, int type, unsigned *clock) {
    BEGIN(device, clock)
    WHOLE(device)
    if (type != 1 && type != 2) return INVALID;
    *clock = (unsigned)(type == 1 ? VALUE(sm_clock) : VALUE(memory_clock));
    return 0;
}
#ifndef NO_EVENT_REASONS
nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons) {
    BEGIN(device, reasons)
    WHOLE(device)
    *reasons = (unsigned long long)VALUE(reasons);
    return 0;
}
#endif
nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons) {
    BEGIN(device, throttle_reasons)
    WHOLE(device)
    *reasons = (unsigned long long)VALUE(reasons);
    return 0;
}
nvmlReturn_t nvmlDeviceGetMaxPcieLinkGeneration(nvmlDevice_t device, unsigned *value) {
    BEGIN(device, link)
    *value = (unsigned)VALUE(link_generation);
    return 0;
}
nvmlReturn_t nvmlDeviceGetMaxPcieLinkWidth(nvmlDevice_t device, unsigned *value) {
    BEGIN(device, link)
    *value = 16;
    return 0;
}
nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, int direction, unsigned *value) {
    BEGIN(device, throughput)
    WHOLE(device)
    VALUE(throughput_calls)++;
    usleep((useconds_t)(VALUE(block_us) & 0xfffff));
    *value = (unsigned)(direction == 0 ? VALUE(throughput_tx) : VALUE(throughput_rx));
    return 0;
}

#ifndef NO_FIELDS
typedef union { double d; unsigned ui; unsigned long ul; unsigned long long ull; long long sll; int si; unsigned short us; } value_t;
typedef struct { unsigned field, scope; long long stamp, latency; int type; nvmlReturn_t code; value_t value; } field_t;

static void store(field_t *field, int64_t type, int64_t raw) {
    field->type = (int)type;
    field->value.ull = 0;
    switch (type) {
    case 0: field->value.d = VALUE(nan) ? NAN : (double)raw; break;
    case 1: field->value.ui = (unsigned)raw; break;
    case 5: field->value.si = (int)raw; break;
    case 6: field->value.us = (unsigned short)raw; break;
    default: field->value.ull = (unsigned long long)raw;
    }
}
nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, field_t *fields) {
    BEGIN(device, fields)
    WHOLE(device)
    for (int i = 0; i < count; i++) {
        field_t *field = &fields[i];
        VALUE(stamp) += VALUE(stamp_step);
        field->stamp = VALUE(stamp);
        field->latency = 1;
        field->code = 0;
        if (field->field == 197 || field->field == 198) {
            field->code = (int)VALUE(ret_pcie);
            int64_t raw = field->field == 197 ? (VALUE(pcie_tx) += VALUE(pcie_step)) : (VALUE(pcie_rx) += VALUE(pcie_step));
            store(field, VALUE(pcie_type), raw);
        } else if (field->field == 138 || field->field == 139) {
            field->code = (int)VALUE(ret_nvlink);
            int64_t raw = field->field == 138 ? VALUE(nvlink_tx) : VALUE(nvlink_rx);
            /* One link has an eighteenth; all are asked for by the largest scope. */
            store(field, VALUE(nvlink_type), field->scope == 0xffffffffu ? raw : raw / 18);
        } else if (field->field == 186) {
            field->code = (int)VALUE(ret_power_field);
            store(field, 1, VALUE(power_now));
        } else {
            field->code = UNSUPPORTED;
        }
    }
    return 0;
}
#endif

#ifndef NO_GPM
typedef struct { const char *one, *two, *unit; } info_t;
typedef struct { unsigned id; nvmlReturn_t code; double value; info_t info; } metric_t;
typedef struct { unsigned version, count; void *sample1, *sample2; metric_t metrics[]; } metrics_t;
typedef struct { unsigned version, supported; } support_t;

nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, support_t *support) {
    BEGIN(device, gpm)
    if (support->version != 1) return INVALID;
    support->supported = (unsigned)VALUE(gpm);
    return 0;
}
nvmlReturn_t nvmlGpmSampleAlloc(void **sample) {
    *sample = calloc(1, 64);
    VALUE(gpm_held)++;
    return 0;
}
nvmlReturn_t nvmlGpmSampleFree(void *sample) {
    free(sample);
    VALUE(gpm_held)--;
    return 0;
}
nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t device, void *sample) {
    BEGIN(device, gpm_sample)
    ((int64_t *)sample)[0] = ++VALUE(gpm_time);
    return 0;
}
nvmlReturn_t nvmlGpmMetricsGet(metrics_t *asked) {
    if (asked->version != 1) return INVALID;
    /* Given in the wrong order the driver would answer with negative rates. */
    if (((int64_t *)asked->sample1)[0] >= ((int64_t *)asked->sample2)[0]) return INVALID;
    for (unsigned i = 0; i < asked->count; i++) {
        metric_t *metric = &asked->metrics[i];
        metric->code = (int)VALUE(ret_metric);
        metric->value = VALUE(nan) ? NAN : (double)(metric->id == 20 || metric->id == 61 ? VALUE(gpm_tx) : VALUE(gpm_rx));
    }
    return 0;
}
#endif

#ifndef NO_MIG
nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending) {
    BEGIN(device, mig)
    *current = *pending = VALUE(mig_gpu) == 0 || VALUE(mig_gpu) == gpu_of(device) + 1 ? (unsigned)VALUE(mig) : 0;
    return 0;
}
nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count) {
    BEGIN(device, mig)
    *count = (unsigned)VALUE(mig_most);
    return 0;
}
nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *part) {
    BEGIN(device, mig)
    if (index >= (unsigned)VALUE(mig_parts)) return NOT_FOUND;
    *part = (nvmlDevice_t)(uintptr_t)(0x2000 + 16 * gpu_of(device) + index);
    return 0;
}
nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned *id) {
    BEGIN(device, mig)
    if (instance_of(device) < 0) return INVALID;
    *id = 7 + (unsigned)instance_of(device);
    return 0;
}
nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned *id) {
    BEGIN(device, mig)
    *id = 0;
    return 0;
}
#endif
