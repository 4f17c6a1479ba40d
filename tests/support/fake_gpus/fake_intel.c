/* A libze_loader.so.1 that answers Sysman's calls as a shared file tells it to. Structures, their numbers and those of enums are
   those of ze_api.h and zes_api.h of Level Zero 1.17. */

#include "slots.h"

typedef uint32_t ze_result_t;
typedef uint8_t ze_bool_t;
typedef void *handle_t;
enum { LOST = 0x70000001, UNINITIALIZED = 0x78000001, UNSUPPORTED = 0x78000003, INVALID = 0x78000004, BAD_HANDLE = 0x78000005 };

typedef struct { uint8_t id[16]; } zes_uuid_t;
typedef struct {
    uint32_t stype; void *pNext;
    uint32_t type, vendorId, deviceId, flags, subdeviceId, coreClockRate;
    uint64_t maxMemAllocSize;
    uint32_t maxHardwareContexts, maxCommandQueuePriority, numThreadsPerEU, physicalEUSimdWidth, numEUsPerSubslice;
    uint32_t numSubslicesPerSlice, numSlices;
    uint64_t timerResolution;
    uint32_t timestampValidBits, kernelTimestampValidBits;
    zes_uuid_t uuid;
    char name[256];
} ze_device_properties_t;
typedef struct {
    uint32_t stype; void *pNext;
    ze_device_properties_t core;
    uint32_t numSubdevices;
    char serialNumber[64], boardNumber[64], brandName[64], modelName[64], vendorName[64], driverVersion[64];
} zes_device_properties_t;
typedef struct { uint32_t domain, bus, device, function; } zes_pci_address_t;
typedef struct { int32_t gen, width; int64_t maxBandwidth; } zes_pci_speed_t;
typedef struct {
    uint32_t stype; void *pNext;
    zes_pci_address_t address; zes_pci_speed_t maxSpeed;
    ze_bool_t haveBandwidthCounters, havePacketCounters, haveReplayCounters;
} zes_pci_properties_t;
typedef struct {
    uint64_t timestamp, replayCounter, packetCounter, rxCounter, txCounter;
    zes_pci_speed_t speed;
} zes_pci_stats_t;
typedef struct { uint32_t stype; void *pNext; uint32_t type; ze_bool_t onSubdevice; uint32_t subdeviceId; } zes_engine_properties_t;
typedef struct { uint64_t activeTime, timestamp; } zes_engine_stats_t;
typedef struct {
    uint32_t stype; void *pNext;
    uint32_t type; ze_bool_t onSubdevice; uint32_t subdeviceId;
    ze_bool_t canControl, isThrottleEventSupported;
    double min, max;
} zes_freq_properties_t;
typedef struct {
    uint32_t stype; const void *pNext;
    double currentVoltage, request, tdp, efficient, actual;
    uint32_t throttleReasons;
} zes_freq_state_t;
typedef struct {
    uint32_t stype; void *pNext;
    uint32_t type; ze_bool_t onSubdevice; uint32_t subdeviceId; uint32_t location;
    uint64_t physicalSize;
    int32_t busWidth, numChannels;
} zes_mem_properties_t;
typedef struct { uint32_t stype; const void *pNext; uint32_t health; uint64_t free, size; } zes_mem_state_t;
typedef struct {
    uint32_t stype; void *pNext;
    uint32_t type; ze_bool_t onSubdevice; uint32_t subdeviceId;
    double maxTemperature;
    ze_bool_t isCriticalTempSupported, isThreshold1Supported, isThreshold2Supported;
} zes_temp_properties_t;
typedef struct {
    uint32_t stype; void *pNext;
    ze_bool_t onSubdevice; uint32_t subdeviceId;
    ze_bool_t canControl, isEnergyThresholdSupported;
    int32_t defaultLimit, minLimit, maxLimit;
} zes_power_properties_t;
typedef struct { uint32_t stype; void *pNext; uint32_t domain; void *defaultLimit; } zes_power_ext_properties_t;
typedef struct { uint64_t energy, timestamp; } zes_power_energy_counter_t;

static int began;

/* A handle says what it is: its kind, the device, and its place among those of its kind there. */
enum { DRIVER = 1, DEVICE, MEMORY, ENGINE, POWER, CLOCK, SENSOR };
#define HANDLE(kind, device, place) ((handle_t)(uintptr_t)((kind) << 16 | (device) << 8 | (place)))
#define DEVICE_OF(handle) ((int)((uintptr_t)(handle) >> 8 & 0xff))
#define PLACE_OF(handle) ((int)((uintptr_t)(handle) & 0xff))

static ze_result_t begin(handle_t handle, int kind, int64_t code) {
    if (!began || !slots) return UNINITIALIZED;
    if ((int)((uintptr_t)handle >> 16) != kind) return BAD_HANDLE;
    return (ze_result_t)code;
}
#define BEGIN(handle, kind, name)                                                       \
    {                                                                                   \
        ze_result_t code = slots ? begin(handle, kind, VALUE(ret_##name)) : UNINITIALIZED; \
        if (code) return code;                                                          \
    }
#define EXPECT(about, number) \
    if ((about)->stype != (number)) return INVALID;

static ze_result_t list(int kind, int device, int64_t have, uint32_t *count, handle_t *handles) {
    if (handles)
        for (uint32_t place = 0; place < *count && place < have; place++) handles[place] = HANDLE(kind, device, place);
    *count = (uint32_t)have;
    return 0;
}
/* Domains of a kind: first those of the whole device, then one a tile. */
static int64_t domains(int64_t whole) { return (VALUE(only_tiles) ? 0 : whole) + VALUE(tiles); }
static int tile_of(handle_t domain, int whole) { return PLACE_OF(domain) - (VALUE(only_tiles) ? 0 : whole); }
#define ON_TILE(about, domain, whole)                              \
    (about)->onSubdevice = (ze_bool_t)(tile_of(domain, whole) >= 0); \
    (about)->subdeviceId = (uint32_t)(tile_of(domain, whole) >= 0 ? tile_of(domain, whole) : 0);

ze_result_t zesInit(uint32_t flags) {
    if (!load_slots("FAKE_INTEL")) return UNINITIALIZED;
    if (flags) return INVALID;
    VALUE(inits)++;
    began = !VALUE(ret_init);
    return (ze_result_t)VALUE(ret_init);
}
/* A driver a device, listed from the end of the bus: who wants them in its order must sort. */
ze_result_t zesDriverGet(uint32_t *count, handle_t *drivers) {
    if (!began) return UNINITIALIZED;
    if (VALUE(ret_drivers)) return (ze_result_t)VALUE(ret_drivers);
    if (drivers)
        for (uint32_t place = 0; place < *count; place++) drivers[place] = HANDLE(DRIVER, VALUE(count) - 1 - place, 0);
    *count = (uint32_t)VALUE(count);
    return 0;
}
ze_result_t zesDeviceGet(handle_t driver, uint32_t *count, handle_t *devices) {
    BEGIN(driver, DRIVER, devices)
    return list(DEVICE, DEVICE_OF(driver), 1, count, devices);
}
static void uuid_of(int device, int tile, uint8_t *id) {
    memset(id, 0x80, 16);
    id[7] = (uint8_t)device;
    id[15] = (uint8_t)(tile + 1);
}
ze_result_t zesDeviceGetProperties(handle_t device, zes_device_properties_t *about) {
    BEGIN(device, DEVICE, device)
    EXPECT(about, 0x1)
    about->core.type = VALUE(npu) == DEVICE_OF(device) + 1 ? 5 : 1;
    about->numSubdevices = (uint32_t)VALUE(tiles);
    uuid_of(DEVICE_OF(device), -1, about->core.uuid.id);
    put_text(about->core.name, sizeof about->core.name, "Fake Max 1550");
    put_text(about->modelName, sizeof about->modelName, "unknown");
    put_text(about->driverVersion, sizeof about->driverVersion, "1.6.33578");
    return 0;
}
#ifndef NO_UUID
ze_result_t zesDriverGetDeviceByUuidExp(handle_t driver, zes_uuid_t uuid, handle_t *device, ze_bool_t *on_tile, uint32_t *tile) {
    BEGIN(driver, DRIVER, uuid)
    for (int number = -1; number < VALUE(tiles); number++) {
        uint8_t id[16];
        uuid_of(DEVICE_OF(driver), number, id);
        if (memcmp(id, uuid.id, 16)) continue;
        *device = HANDLE(DEVICE, DEVICE_OF(driver), 0);
        *on_tile = number >= 0;
        *tile = number >= 0 ? (uint32_t)number : 0;
        return 0;
    }
    return INVALID;
}
#endif
ze_result_t zesDevicePciGetProperties(handle_t device, zes_pci_properties_t *about) {
    BEGIN(device, DEVICE, pci)
    EXPECT(about, 0x2)
    about->address.bus = (uint32_t)(0x29 + DEVICE_OF(device));
    about->haveBandwidthCounters = (ze_bool_t)VALUE(bandwidth);
    return 0;
}
ze_result_t zesDevicePciGetStats(handle_t device, zes_pci_stats_t *stats) {
    BEGIN(device, DEVICE, pci_stats)
    stats->timestamp = (uint64_t)VALUE(stamp);
    stats->replayCounter = stats->packetCounter = 77;
    stats->rxCounter = (uint64_t)VALUE(rx);
    stats->txCounter = (uint64_t)VALUE(tx);
    return 0;
}
/* Of the device a module of the host's memory, and one of its own; of each tile one. */
ze_result_t zesDeviceEnumMemoryModules(handle_t device, uint32_t *count, handle_t *modules) {
    BEGIN(device, DEVICE, memories)
    return list(MEMORY, DEVICE_OF(device), domains(2), count, modules);
}
ze_result_t zesMemoryGetProperties(handle_t module, zes_mem_properties_t *about) {
    BEGIN(module, MEMORY, memory)
    EXPECT(about, 0xb)
    ON_TILE(about, module, 2)
    about->location = tile_of(module, 2) == -2 ? 0 : 1;
    about->physicalSize = (uint64_t)VALUE(physical);
    return 0;
}
ze_result_t zesMemoryGetState(handle_t module, zes_mem_state_t *state) {
    BEGIN(module, MEMORY, memory_state)
    EXPECT(state, 0x1e)
    if (VALUE(block_us) > 0) usleep((useconds_t)VALUE(block_us));
    state->size = (uint64_t)VALUE(size);
    state->free = (uint64_t)VALUE(free) - ((uint64_t)DEVICE_OF(module) << 20) - ((uint64_t)(tile_of(module, 2) + 1) << 10);
    return 0;
}
/* Of the device its compute engines and all engines, in this order; of each tile all of its engines. */
ze_result_t zesDeviceEnumEngineGroups(handle_t device, uint32_t *count, handle_t *engines) {
    BEGIN(device, DEVICE, engines)
    return list(ENGINE, DEVICE_OF(device), domains(2), count, engines);
}
ze_result_t zesEngineGetProperties(handle_t engine, zes_engine_properties_t *about) {
    BEGIN(engine, ENGINE, engine)
    EXPECT(about, 0x5)
    ON_TILE(about, engine, 2)
    about->type = tile_of(engine, 2) == -2 ? 1 : 0;
    return 0;
}
ze_result_t zesEngineGetActivity(handle_t engine, zes_engine_stats_t *stats) {
    BEGIN(engine, ENGINE, activity)
    /* The compute engines alone stand still. */
    stats->activeTime = tile_of(engine, 2) == -2 ? 7 : (uint64_t)(VALUE(active) += VALUE(active_step));
    stats->timestamp = (uint64_t)(VALUE(clock) += VALUE(clock_step));
    return 0;
}
/* Of the device its memory's power and the card's, in this order; of each tile the stack's. */
ze_result_t zesDeviceEnumPowerDomains(handle_t device, uint32_t *count, handle_t *powers) {
    BEGIN(device, DEVICE, powers)
    return list(POWER, DEVICE_OF(device), domains(2), count, powers);
}
ze_result_t zesPowerGetProperties(handle_t power, zes_power_properties_t *about) {
    BEGIN(power, POWER, power)
    EXPECT(about, 0xd)
    ON_TILE(about, power, 2)
    zes_power_ext_properties_t *more = about->pNext;
    if (more && !VALUE(no_levels)) {
        EXPECT(more, 0x28)
        more->domain = tile_of(power, 2) == -2 ? 4 : tile_of(power, 2) == -1 ? 1 : 3;
    }
    return 0;
}
ze_result_t zesPowerGetEnergyCounter(handle_t power, zes_power_energy_counter_t *counter) {
    BEGIN(power, POWER, energy)
    /* The memory's counter is apart from the others'. */
    if (tile_of(power, 2) == -2)
        counter->energy = 1000;
    else
        counter->energy = (uint64_t)(VALUE(energy) += VALUE(energy_step));
    counter->timestamp = (uint64_t)(VALUE(stamp) += VALUE(stamp_step));
    return 0;
}
/* Of the device the clocks of its cores and of its memory; of each tile that of its cores. */
ze_result_t zesDeviceEnumFrequencyDomains(handle_t device, uint32_t *count, handle_t *clocks) {
    BEGIN(device, DEVICE, clocks)
    return list(CLOCK, DEVICE_OF(device), domains(2), count, clocks);
}
ze_result_t zesFrequencyGetProperties(handle_t clock, zes_freq_properties_t *about) {
    BEGIN(clock, CLOCK, clock)
    EXPECT(about, 0x9)
    ON_TILE(about, clock, 2)
    about->type = tile_of(clock, 2) == -1 ? 1 : 0;
    return 0;
}
ze_result_t zesFrequencyGetState(handle_t clock, zes_freq_state_t *state) {
    BEGIN(clock, CLOCK, clock_state)
    EXPECT(state, 0x1b)
    state->currentVoltage = state->request = state->tdp = state->efficient = -1;
    state->actual = (double)(tile_of(clock, 2) == -1 ? VALUE(memory_clock) : VALUE(core_clock));
    if (VALUE(nan)) state->actual = NAN;
    state->throttleReasons = (uint32_t)VALUE(reasons);
    return 0;
}
/* Of the device the hottest of its GPU and of everything, in this order; of each tile the hottest of everything. */
ze_result_t zesDeviceEnumTemperatureSensors(handle_t device, uint32_t *count, handle_t *sensors) {
    BEGIN(device, DEVICE, sensors)
    return list(SENSOR, DEVICE_OF(device), domains(2), count, sensors);
}
ze_result_t zesTemperatureGetProperties(handle_t sensor, zes_temp_properties_t *about) {
    BEGIN(sensor, SENSOR, sensor)
    EXPECT(about, 0x14)
    ON_TILE(about, sensor, 2)
    about->type = tile_of(sensor, 2) == -2 ? 1 : 0;
    return 0;
}
ze_result_t zesTemperatureGetState(handle_t sensor, double *degrees) {
    BEGIN(sensor, SENSOR, temperature)
    *degrees = tile_of(sensor, 2) == -2 ? 1.0 : VALUE(nan) ? NAN : (double)VALUE(hottest);
    return 0;
}

long fake_layout(const char *name) {
    static const layout_t table[] = {
        SIZE(zes_uuid_t), AT(zes_uuid_t, id),
        SIZE(ze_device_properties_t), AT(ze_device_properties_t, stype), AT(ze_device_properties_t, pNext),
        AT(ze_device_properties_t, type), AT(ze_device_properties_t, vendorId), AT(ze_device_properties_t, deviceId),
        AT(ze_device_properties_t, flags), AT(ze_device_properties_t, subdeviceId), AT(ze_device_properties_t, coreClockRate),
        AT(ze_device_properties_t, maxMemAllocSize), AT(ze_device_properties_t, maxHardwareContexts),
        AT(ze_device_properties_t, maxCommandQueuePriority), AT(ze_device_properties_t, numThreadsPerEU),
        AT(ze_device_properties_t, physicalEUSimdWidth), AT(ze_device_properties_t, numEUsPerSubslice),
        AT(ze_device_properties_t, numSubslicesPerSlice), AT(ze_device_properties_t, numSlices),
        AT(ze_device_properties_t, timerResolution), AT(ze_device_properties_t, timestampValidBits),
        AT(ze_device_properties_t, kernelTimestampValidBits), AT(ze_device_properties_t, uuid), AT(ze_device_properties_t, name),
        SIZE(zes_device_properties_t), AT(zes_device_properties_t, stype), AT(zes_device_properties_t, pNext),
        AT(zes_device_properties_t, core), AT(zes_device_properties_t, numSubdevices), AT(zes_device_properties_t, serialNumber),
        AT(zes_device_properties_t, boardNumber), AT(zes_device_properties_t, brandName), AT(zes_device_properties_t, modelName),
        AT(zes_device_properties_t, vendorName), AT(zes_device_properties_t, driverVersion),
        SIZE(zes_pci_address_t), AT(zes_pci_address_t, domain), AT(zes_pci_address_t, bus), AT(zes_pci_address_t, device),
        AT(zes_pci_address_t, function),
        SIZE(zes_pci_speed_t), AT(zes_pci_speed_t, gen), AT(zes_pci_speed_t, width), AT(zes_pci_speed_t, maxBandwidth),
        SIZE(zes_pci_properties_t), AT(zes_pci_properties_t, stype), AT(zes_pci_properties_t, pNext),
        AT(zes_pci_properties_t, address), AT(zes_pci_properties_t, maxSpeed), AT(zes_pci_properties_t, haveBandwidthCounters),
        AT(zes_pci_properties_t, havePacketCounters), AT(zes_pci_properties_t, haveReplayCounters),
        SIZE(zes_pci_stats_t), AT(zes_pci_stats_t, timestamp), AT(zes_pci_stats_t, replayCounter),
        AT(zes_pci_stats_t, packetCounter), AT(zes_pci_stats_t, rxCounter), AT(zes_pci_stats_t, txCounter),
        AT(zes_pci_stats_t, speed),
        SIZE(zes_engine_properties_t), AT(zes_engine_properties_t, stype), AT(zes_engine_properties_t, pNext),
        AT(zes_engine_properties_t, type), AT(zes_engine_properties_t, onSubdevice), AT(zes_engine_properties_t, subdeviceId),
        SIZE(zes_engine_stats_t), AT(zes_engine_stats_t, activeTime), AT(zes_engine_stats_t, timestamp),
        SIZE(zes_freq_properties_t), AT(zes_freq_properties_t, stype), AT(zes_freq_properties_t, pNext),
        AT(zes_freq_properties_t, type), AT(zes_freq_properties_t, onSubdevice), AT(zes_freq_properties_t, subdeviceId),
        AT(zes_freq_properties_t, canControl), AT(zes_freq_properties_t, isThrottleEventSupported), AT(zes_freq_properties_t, min),
        AT(zes_freq_properties_t, max),
        SIZE(zes_freq_state_t), AT(zes_freq_state_t, stype), AT(zes_freq_state_t, pNext), AT(zes_freq_state_t, currentVoltage),
        AT(zes_freq_state_t, request), AT(zes_freq_state_t, tdp), AT(zes_freq_state_t, efficient), AT(zes_freq_state_t, actual),
        AT(zes_freq_state_t, throttleReasons),
        SIZE(zes_mem_properties_t), AT(zes_mem_properties_t, stype), AT(zes_mem_properties_t, pNext),
        AT(zes_mem_properties_t, type), AT(zes_mem_properties_t, onSubdevice), AT(zes_mem_properties_t, subdeviceId),
        AT(zes_mem_properties_t, location), AT(zes_mem_properties_t, physicalSize), AT(zes_mem_properties_t, busWidth),
        AT(zes_mem_properties_t, numChannels),
        SIZE(zes_mem_state_t), AT(zes_mem_state_t, stype), AT(zes_mem_state_t, pNext), AT(zes_mem_state_t, health),
        AT(zes_mem_state_t, free), AT(zes_mem_state_t, size),
        SIZE(zes_temp_properties_t), AT(zes_temp_properties_t, stype), AT(zes_temp_properties_t, pNext),
        AT(zes_temp_properties_t, type), AT(zes_temp_properties_t, onSubdevice), AT(zes_temp_properties_t, subdeviceId),
        AT(zes_temp_properties_t, maxTemperature), AT(zes_temp_properties_t, isCriticalTempSupported),
        AT(zes_temp_properties_t, isThreshold1Supported), AT(zes_temp_properties_t, isThreshold2Supported),
        SIZE(zes_power_properties_t), AT(zes_power_properties_t, stype), AT(zes_power_properties_t, pNext),
        AT(zes_power_properties_t, onSubdevice), AT(zes_power_properties_t, subdeviceId), AT(zes_power_properties_t, canControl),
        AT(zes_power_properties_t, isEnergyThresholdSupported), AT(zes_power_properties_t, defaultLimit),
        AT(zes_power_properties_t, minLimit), AT(zes_power_properties_t, maxLimit),
        SIZE(zes_power_ext_properties_t), AT(zes_power_ext_properties_t, stype), AT(zes_power_ext_properties_t, pNext),
        AT(zes_power_ext_properties_t, domain), AT(zes_power_ext_properties_t, defaultLimit),
        SIZE(zes_power_energy_counter_t), AT(zes_power_energy_counter_t, energy), AT(zes_power_energy_counter_t, timestamp),
    };
    return find_layout(table, sizeof table / sizeof *table, name);
}
