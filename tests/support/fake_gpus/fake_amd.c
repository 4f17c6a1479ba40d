/* A libamd_smi.so that answers what a shared file tells it to. Declarations are those of amd_smi/amdsmi.h (ROCm 6.0 to 7.0) in
   as far as they agree; of a structure that differs between releases only the first member is filled in. */

#include "slots.h"

typedef uint32_t amdsmi_status_t;
typedef void *amdsmi_socket_handle;
typedef void *amdsmi_processor_handle;
typedef struct { uint32_t gfx_activity, umc_activity, mm_activity, reserved[13]; } amdsmi_engine_usage_t;
enum { INVAL = 1, NOT_SUPPORTED = 2, NOT_FOUND = 31, NOT_INIT = 32 };

static int began;

static amdsmi_status_t begin(amdsmi_processor_handle processor, int64_t code) {
    uintptr_t number = (uintptr_t)processor;
    if (!began || !slots) return NOT_INIT;
    if (number < 0x2000 || number >= 0x2000 + (uintptr_t)VALUE(count)) return INVAL;
    return (amdsmi_status_t)code;
}
#define BEGIN(processor, name)                                              \
    {                                                                       \
        amdsmi_status_t code = slots ? begin(processor, VALUE(ret_##name)) : NOT_INIT; \
        if (code) return code;                                              \
    }
#define INDEX(processor) ((uint64_t)((uintptr_t)(processor) - 0x2000))

amdsmi_status_t amdsmi_init(uint64_t flags) {
    if (!load_slots("FAKE_AMD")) return 18;
    if (flags != 1 << 1) return INVAL;
    VALUE(inits)++;
    began = !VALUE(ret_init);
    return (amdsmi_status_t)VALUE(ret_init);
}
amdsmi_status_t amdsmi_shut_down(void) {
    if (slots) VALUE(shutdowns)++;
    began = 0;
    return 0;
}
/* A socket a device, listed from the end of the bus: who wants them in its order must sort. */
amdsmi_status_t amdsmi_get_socket_handles(uint32_t *count, amdsmi_socket_handle *handles) {
    if (!began) return NOT_INIT;
    if (VALUE(ret_sockets)) return (amdsmi_status_t)VALUE(ret_sockets);
    if (handles)
        for (uint32_t place = 0; place < *count; place++) handles[place] = (void *)(uintptr_t)(0x1000 + VALUE(count) - 1 - place);
    *count = (uint32_t)VALUE(count);
    return 0;
}
amdsmi_status_t amdsmi_get_processor_handles(amdsmi_socket_handle socket, uint32_t *count, amdsmi_processor_handle *handles) {
    if (!began) return NOT_INIT;
    if (VALUE(ret_processors)) return (amdsmi_status_t)VALUE(ret_processors);
    if (handles && *count >= 1) handles[0] = (void *)((uintptr_t)socket + 0x1000);
    *count = 1;
    return 0;
}
/* The first member alone is alike in all releases; what follows it is of another size in each. */
amdsmi_status_t amdsmi_get_gpu_asic_info(amdsmi_processor_handle processor, char *info) {
    BEGIN(processor, asic)
    put_text(info, 256, "Fake MI300X");
    memset(info + 256, 0x7f, 700);
    return 0;
}
amdsmi_status_t amdsmi_get_gpu_bdf_id(amdsmi_processor_handle processor, uint64_t *bdf) {
    BEGIN(processor, bus)
    *bdf = 1ull << 32 | 0x30000000 | (0x63 + INDEX(processor)) << 8;
    return 0;
}
amdsmi_status_t amdsmi_get_gpu_memory_total(amdsmi_processor_handle processor, int type, uint64_t *total) {
    BEGIN(processor, total)
    if (type) return INVAL;
    *total = (uint64_t)VALUE(total);
    return 0;
}
amdsmi_status_t amdsmi_get_gpu_memory_usage(amdsmi_processor_handle processor, int type, uint64_t *used) {
    BEGIN(processor, used)
    if (VALUE(block_us) > 0) usleep((useconds_t)VALUE(block_us));
    if (type) return INVAL;
    *used = (uint64_t)VALUE(used) + (INDEX(processor) << 20);
    return 0;
}
amdsmi_status_t amdsmi_get_gpu_activity(amdsmi_processor_handle processor, amdsmi_engine_usage_t *usage) {
    BEGIN(processor, activity)
    memset(usage, 0x7f, sizeof *usage);
    usage->gfx_activity = (uint32_t)VALUE(activity);
    usage->umc_activity = 11;
    usage->mm_activity = 0xFFFF;
    return 0;
}
#ifndef NO_ENERGY
amdsmi_status_t amdsmi_get_energy_count(amdsmi_processor_handle processor, uint64_t *energy, float *resolution, uint64_t *stamp) {
    BEGIN(processor, energy)
    *energy = (uint64_t)(VALUE(energy) += VALUE(energy_step));
    *stamp = (uint64_t)(VALUE(stamp) += VALUE(stamp_step));
    *resolution = (float)VALUE(resolution_64ths) / 64;
    return 0;
}
#endif
amdsmi_status_t amdsmi_get_temp_metric(amdsmi_processor_handle processor, int sensor, int metric, int64_t *temperature) {
    if (sensor == 1) BEGIN(processor, hotspot) else BEGIN(processor, edge)
    if (metric || sensor > 1) return INVAL;
    *temperature = sensor ? VALUE(hotspot) : VALUE(edge);
    return 0;
}
amdsmi_status_t amdsmi_get_clock_info(amdsmi_processor_handle processor, int type, uint32_t *info) {
    BEGIN(processor, clock)
    if (type != 0 && type != 4) return INVAL;
    memset(info, 0x7f, 32);
    info[0] = (uint32_t)(type ? VALUE(memory_clock) : VALUE(core_clock));
    return 0;
}

long fake_layout(const char *name) {
    static const layout_t table[] = {
        SIZE(amdsmi_engine_usage_t), AT(amdsmi_engine_usage_t, gfx_activity), AT(amdsmi_engine_usage_t, umc_activity),
        AT(amdsmi_engine_usage_t, mm_activity), AT(amdsmi_engine_usage_t, reserved),
    };
    return find_layout(table, sizeof table / sizeof *table, name);
}
