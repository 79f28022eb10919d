/* A stand-in for the CUDA driver where there is no GPU: device memory is memory of the host behind memfds.
 *
 * It is strict where the driver's documentation is: sizes and addresses in multiples of the granularity, copies within
 * one allocation or one registered range at each end, nothing accessed before it is mapped with access, no call without
 * a device. Streams are threads, so that work is not done when a call returns. It says nothing of speed, and nothing
 * of what a real driver does with descriptors when processes end.
 *
 * KVLEASE_STANDIN_BYTES: memory of each device (1 GiB); KVLEASE_STANDIN_DEVICES: how many there are (1);
 * KVLEASE_STANDIN_NO_BATCH: a driver without cuMemcpyBatchAsync; KVLEASE_STANDIN_MICROSECONDS: of each operation of a
 * stream (50); KVLEASE_STANDIN_FAIL: a call that fails with CUDA_ERROR_UNKNOWN, by name;
 * KVLEASE_STANDIN_COUNTS: a file to which the process appends what it copied, a line a copying call.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define GRANULARITY ((size_t)2 << 20)
#define RANGES_MAX 65536

enum {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600,
    ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, NOT_SUPPORTED = 801, UNKNOWN = 999
};

typedef int Result;
typedef uint64_t Address;
typedef struct { int type, requested; int location_type, location_id; void *win32; unsigned char flags[8]; } Properties;
typedef struct { int location_type, location_id, flags; } Access;
typedef struct { int source_order; int source_hint[2], target_hint[2]; unsigned flags; } Attributes;

typedef enum { RESERVED, MAPPED, REGISTERED } Kind;
typedef struct { Kind kind; Address start; size_t bytes; int has_access, mapped; } Range;

typedef struct Work { struct Work *next; Address target, source; size_t bytes; int value; } Work;
typedef struct Stream {
    pthread_t thread; pthread_mutex_t lock; pthread_cond_t changed;
    Work *first, *last; uint64_t submitted, done; int priority, is_over; unsigned flags;
} Stream;
typedef struct { Stream *stream; uint64_t after; } Event;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Range ranges[RANGES_MAX];
static int num_ranges, is_initialized;
static _Thread_local void *current;
static int contexts[64];

static long number(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
}
static int fails(const char *name) {
    const char *text = getenv("KVLEASE_STANDIN_FAIL");
    return text && !strcmp(text, name);
}
#define BEGIN if (!is_initialized) return NOT_INITIALIZED; if (fails(__func__)) return UNKNOWN
#define IN_CONTEXT BEGIN; if (!current) return INVALID_CONTEXT

static Range *find(Kind kind, Address start, size_t bytes) {
    for (int i = 0; i < num_ranges; i++)
        if (ranges[i].kind == kind && ranges[i].start <= start && start + bytes <= ranges[i].start + ranges[i].bytes)
            return &ranges[i];
    return NULL;
}
static int touches(Kind kind, Address start, size_t bytes) {
    for (int i = 0; i < num_ranges; i++)
        if (ranges[i].kind == kind && ranges[i].start < start + bytes && start < ranges[i].start + ranges[i].bytes)
            return 1;
    return 0;
}
static Result add(Kind kind, Address start, size_t bytes) {
    if (num_ranges == RANGES_MAX) return OUT_OF_MEMORY;
    ranges[num_ranges++] = (Range){kind, start, bytes, 0, 0};
    return OK;
}
static void drop(Range *range) { *range = ranges[--num_ranges]; }

static Result cuInit(unsigned flags) { is_initialized = 1; return flags ? INVALID_VALUE : number("KVLEASE_STANDIN_DEVICES", 1) ? OK : NO_DEVICE; }
static Result cuDriverGetVersion(int *version) { *version = number("KVLEASE_STANDIN_NO_BATCH", 0) ? 12040 : 12090; return OK; }
static Result cuDeviceGetCount(int *count) { BEGIN; *count = number("KVLEASE_STANDIN_DEVICES", 1); return OK; }
static Result cuDeviceGet(int *device, int ordinal) {
    BEGIN;
    if (ordinal < 0 || ordinal >= number("KVLEASE_STANDIN_DEVICES", 1)) return INVALID_DEVICE;
    *device = ordinal;
    return OK;
}
static Result cuDeviceGetName(char *name, int bytes, int device) { BEGIN; snprintf(name, bytes, "stand-in %d", device); return OK; }
static Result cuDeviceGetUuid_v2(char *uuid, int device) { BEGIN; memset(uuid, 0x40 + device, 16); return OK; }
static Result cuDeviceTotalMem_v2(size_t *bytes, int device) { BEGIN; (void)device; *bytes = number("KVLEASE_STANDIN_BYTES", 1L << 30); return OK; }
static Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    BEGIN; (void)device;
    /* Virtual memory, posix descriptors, unified addressing: the ones that are asked for. */
    if (attribute == 20) { *value = number("KVLEASE_STANDIN_COMPUTE_MODE", 0); return OK; }
    *value = attribute == 102 || attribute == 103 || attribute == 41 ? !number("KVLEASE_STANDIN_NO_VMM", 0) : 1;
    return OK;
}
static Result cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { IN_CONTEXT; *free_bytes = *total = number("KVLEASE_STANDIN_BYTES", 1L << 30); return OK; }
static Result cuDevicePrimaryCtxRetain(void **context, int device) { BEGIN; *context = &contexts[device]; return OK; }
static Result cuDevicePrimaryCtxRelease_v2(int device) { BEGIN; (void)device; return OK; }
static Result cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) { BEGIN; (void)device; *flags = 0; *is_active = 1; return OK; }
static Result cuCtxSetCurrent(void *context) { BEGIN; current = context; return OK; }
static Result cuCtxGetCurrent(void **context) { BEGIN; *context = current; return OK; }
static Result cuCtxPushCurrent_v2(void *context) { BEGIN; current = context; return OK; }
static Result cuCtxPopCurrent_v2(void **context) { BEGIN; *context = current; current = NULL; return OK; }
static Result cuCtxGetDevice(int *device) { IN_CONTEXT; *device = (int *)current - contexts; return OK; }
static Result cuCtxGetStreamPriorityRange(int *least, int *greatest) { IN_CONTEXT; *least = 0; *greatest = -5; return OK; }
static Result cuGetErrorName(Result error, const char **name) {
    *name = error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : error == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : error == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE" : error == OK ? "CUDA_SUCCESS" : "CUDA_ERROR_OTHER";
    return OK;
}
static Result cuGetErrorString(Result error, const char **text) { static _Thread_local char said[32]; snprintf(said, sizeof said, "error %d", error); *text = said; return OK; }

/* Virtual memory. A handle is a descriptor of a memfd plus one. */
static Result cuMemGetAllocationGranularity(size_t *bytes, const Properties *properties, int option) { BEGIN; (void)option; if (properties->type != 1 || properties->location_type != 1) return INVALID_VALUE; *bytes = GRANULARITY; return OK; }
static Result cuMemCreate(uint64_t *handle, size_t bytes, const Properties *properties, unsigned long long flags) {
    BEGIN;
    if (flags || !bytes || bytes % GRANULARITY || properties->type != 1 || properties->location_type != 1 || properties->requested != 1) return INVALID_VALUE;
    if (bytes > (size_t)number("KVLEASE_STANDIN_BYTES", 1L << 30)) return OUT_OF_MEMORY;
    int fd = memfd_create("standin", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, bytes)) return OUT_OF_MEMORY;
    /* Nobody promises that new memory is zero. */
    char *left = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (left == MAP_FAILED) return OUT_OF_MEMORY;
    memset(left, 0xDB, bytes < (16 << 20) ? bytes : (16 << 20));
    munmap(left, bytes);
    *handle = fd + 1;
    return OK;
}
static Result cuMemRelease(uint64_t handle) { BEGIN; return close((int)handle - 1) ? INVALID_HANDLE : OK; }
static Result cuMemExportToShareableHandle(void *shared, uint64_t handle, int type, unsigned long long flags) {
    BEGIN;
    if (type != 1 || flags) return INVALID_VALUE;
    /* As the driver's own, it does not close on exec. */
    *(int *)shared = dup((int)handle - 1);
    return *(int *)shared < 0 ? INVALID_HANDLE : OK;
}
static Result cuMemImportFromShareableHandle(uint64_t *handle, void *shared, int type) {
    BEGIN;
    if (type != 1) return INVALID_VALUE;
    int fd = fcntl((int)(intptr_t)shared, F_DUPFD_CLOEXEC, 3);
    if (fd < 0) return INVALID_VALUE;
    *handle = fd + 1;
    return OK;
}
static Result cuMemAddressReserve(Address *address, size_t bytes, size_t alignment, Address hint, unsigned long long flags) {
    BEGIN; (void)hint;
    if (!bytes || bytes % GRANULARITY || flags || (alignment & (alignment - 1))) return INVALID_VALUE;
    size_t align = alignment > GRANULARITY ? alignment : GRANULARITY;
    char *found = mmap(NULL, bytes + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return OUT_OF_MEMORY;
    *address = ((Address)found + align - 1) / align * align;
    munmap(found, *address - (Address)found);
    munmap((char *)*address + bytes, (Address)found + align - *address);
    pthread_mutex_lock(&lock);
    Result result = add(RESERVED, *address, bytes);
    pthread_mutex_unlock(&lock);
    return result;
}
static Result cuMemAddressFree(Address address, size_t bytes) {
    BEGIN;
    pthread_mutex_lock(&lock);
    Range *range = find(RESERVED, address, bytes);
    int is_free = range && range->start == address && range->bytes == bytes && !touches(MAPPED, address, bytes);
    if (is_free) { drop(range); munmap((void *)address, bytes); }
    pthread_mutex_unlock(&lock);
    return is_free ? OK : INVALID_VALUE;
}
static Result cuMemMap(Address address, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags) {
    BEGIN;
    struct stat status;
    if (!bytes || bytes % GRANULARITY || address % GRANULARITY || offset || flags || fstat((int)handle - 1, &status)) return INVALID_VALUE;
    /* The driver refuses a size that is not the allocation's. */
    if ((size_t)status.st_size != bytes) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    int fits = find(RESERVED, address, bytes) && !touches(MAPPED, address, bytes);
    fits = fits && mmap((void *)address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)handle - 1, 0) != MAP_FAILED;
    Result result = fits ? add(MAPPED, address, bytes) : INVALID_VALUE;
    pthread_mutex_unlock(&lock);
    return result;
}
static Result cuMemUnmap(Address address, size_t bytes) {
    BEGIN;
    pthread_mutex_lock(&lock);
    Range *range = find(MAPPED, address, bytes);
    int is_whole = range && range->start == address && range->bytes == bytes;
    if (is_whole) { mmap((void *)address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0); drop(range); }
    pthread_mutex_unlock(&lock);
    return is_whole ? OK : INVALID_VALUE;
}
static Result cuMemSetAccess(Address address, size_t bytes, const Access *access, size_t count) {
    BEGIN;
    if (count != 1 || access->location_type != 1 || access->flags != 3) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    Range *range = find(MAPPED, address, bytes);
    if (range) range->has_access = 1;
    pthread_mutex_unlock(&lock);
    return range && !mprotect((void *)address, bytes, PROT_READ | PROT_WRITE) ? OK : INVALID_VALUE;
}

/* Pinned memory. */
static Result cuMemHostRegister_v2(void *start, size_t bytes, unsigned flags) {
    IN_CONTEXT; (void)flags;
    if (!bytes) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    Result result = touches(REGISTERED, (Address)start, bytes) ? ALREADY_REGISTERED : add(REGISTERED, (Address)start, bytes);
    pthread_mutex_unlock(&lock);
    return result;
}
static Result cuMemHostUnregister(void *start) {
    IN_CONTEXT;
    Result result = NOT_REGISTERED;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_ranges; i++)
        if (ranges[i].kind == REGISTERED && ranges[i].start == (Address)start) { drop(&ranges[i]); result = OK; break; }
    pthread_mutex_unlock(&lock);
    return result;
}

/* Streams and events. */
static void *serve(void *argument) {
    Stream *stream = argument;
    long microseconds = number("KVLEASE_STANDIN_MICROSECONDS", 50);
    pthread_mutex_lock(&stream->lock);
    while (1) {
        while (!stream->first && !stream->is_over) pthread_cond_wait(&stream->changed, &stream->lock);
        Work *work = stream->first;
        if (!work) break;
        stream->first = work->next;
        pthread_mutex_unlock(&stream->lock);
        if (microseconds) usleep(microseconds);
        if (work->value < 0) memmove((void *)work->target, (void *)work->source, work->bytes);
        else memset((void *)work->target, work->value, work->bytes);
        free(work);
        pthread_mutex_lock(&stream->lock);
        stream->done++;
        pthread_cond_broadcast(&stream->changed);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}
static void submit(Stream *stream, Address target, Address source, size_t bytes, int value) {
    Work *work = malloc(sizeof *work);
    *work = (Work){NULL, target, source, bytes, value};
    pthread_mutex_lock(&stream->lock);
    if (stream->first) stream->last->next = work; else stream->first = work;
    stream->last = work;
    stream->submitted++;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
}
static Result await_done(Stream *stream, uint64_t after) {
    pthread_mutex_lock(&stream->lock);
    while (stream->done < after) pthread_cond_wait(&stream->changed, &stream->lock);
    pthread_mutex_unlock(&stream->lock);
    return OK;
}
static Result cuStreamCreateWithPriority(Stream **stream, unsigned flags, int priority) {
    IN_CONTEXT;
    *stream = calloc(1, sizeof **stream);
    (*stream)->priority = priority;
    (*stream)->flags = flags;
    pthread_mutex_init(&(*stream)->lock, NULL);
    pthread_cond_init(&(*stream)->changed, NULL);
    return pthread_create(&(*stream)->thread, NULL, serve, *stream) ? UNKNOWN : OK;
}
static Result cuStreamDestroy_v2(Stream *stream) { BEGIN; pthread_mutex_lock(&stream->lock); stream->is_over = 1; pthread_cond_broadcast(&stream->changed); pthread_mutex_unlock(&stream->lock); return OK; }
static Result cuStreamGetPriority(Stream *stream, int *priority) { BEGIN; *priority = stream->priority; return OK; }
static Result cuStreamGetFlags(Stream *stream, unsigned *flags) { BEGIN; *flags = stream->flags; return OK; }
static Result cuStreamGetCtx(Stream *stream, void **context) { BEGIN; (void)stream; *context = current ? current : contexts; return OK; }
static Result cuStreamSynchronize(Stream *stream) { BEGIN; return await_done(stream, stream->submitted); }
static Result cuCtxSynchronize(void) { IN_CONTEXT; return OK; }
static Result cuEventCreate(Event **event, unsigned flags) { IN_CONTEXT; (void)flags; *event = calloc(1, sizeof **event); return OK; }
static Result cuEventDestroy_v2(Event *event) { BEGIN; free(event); return OK; }
static Result cuEventRecord(Event *event, Stream *stream) { BEGIN; event->stream = stream; event->after = stream->submitted; return OK; }
static Result cuEventQuery(Event *event) {
    BEGIN;
    if (!event->stream) return OK;
    pthread_mutex_lock(&event->stream->lock);
    Result result = event->stream->done < event->after ? NOT_READY : OK;
    pthread_mutex_unlock(&event->stream->lock);
    return result;
}
static Result cuEventSynchronize(Event *event) { BEGIN; return event->stream ? await_done(event->stream, event->after) : OK; }

/* Copies. */
static int is_device(Address start, size_t bytes) {
    Range *range = find(MAPPED, start, bytes);
    return range && range->has_access;
}
static Result check(Address start, size_t bytes, int *is_pageable) {
    if (is_device(start, bytes)) return OK;
    if (touches(MAPPED, start, bytes) || touches(RESERVED, start, bytes)) return INVALID_VALUE;
    if (find(REGISTERED, start, bytes)) return OK;
    if (touches(REGISTERED, start, bytes)) return INVALID_VALUE;
    *is_pageable = 1;
    return OK;
}
static void count(const char *call, size_t copies) {
    const char *path = getenv("KVLEASE_STANDIN_COUNTS");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (file) { fprintf(file, "%s %zu\n", call, copies); fclose(file); }
}
static Result cuMemcpyAsync(Address target, Address source, size_t bytes, Stream *stream) {
    IN_CONTEXT;
    int is_pageable = 0;
    pthread_mutex_lock(&lock);
    Result result = check(target, bytes, &is_pageable);
    if (!result) result = check(source, bytes, &is_pageable);
    pthread_mutex_unlock(&lock);
    if (result || !bytes) return result;
    count("copy", 1);
    submit(stream, target, source, bytes, -1);
    return is_pageable ? await_done(stream, stream->submitted) : OK;
}
static Result cuMemcpyBatchAsync(Address *targets, Address *sources, size_t *bytes, size_t num_copies, Attributes *attributes, size_t *indices, size_t num_attributes, size_t *fail_index, Stream *stream) {
    IN_CONTEXT;
    if (!num_copies || num_attributes != 1 || indices[0] || !stream || attributes->source_order != 1) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    Result result = OK;
    for (size_t i = 0; i < num_copies && !result; i++) {
        int is_pageable = 0;
        *fail_index = i;
        result = check(targets[i], bytes[i], &is_pageable);
        if (!result) result = check(sources[i], bytes[i], &is_pageable);
        if (is_pageable || !bytes[i]) result = INVALID_VALUE;
    }
    pthread_mutex_unlock(&lock);
    if (result) return result;
    count("batch", num_copies);
    /* In any order. */
    for (size_t i = num_copies; i--;) submit(stream, targets[i], sources[i], bytes[i], -1);
    return OK;
}
/* The same as CUDA 13 has it. */
static Result cuMemcpyBatchAsync_v2(Address *targets, Address *sources, size_t *bytes, size_t num_copies, Attributes *attributes, size_t *indices, size_t num_attributes, Stream *stream) {
    size_t fail_index;
    if (fails("cuMemcpyBatchAsync")) return UNKNOWN;
    return cuMemcpyBatchAsync(targets, sources, bytes, num_copies, attributes, indices, num_attributes, &fail_index, stream);
}
static Result cuMemsetD8Async(Address start, unsigned char value, size_t bytes, Stream *stream) {
    IN_CONTEXT;
    pthread_mutex_lock(&lock);
    int is_there = is_device(start, bytes);
    pthread_mutex_unlock(&lock);
    if (!is_there) return INVALID_VALUE;
    submit(stream, start, 0, bytes, value);
    return OK;
}
static Result cuMemsetD8_v2(Address start, unsigned char value, size_t bytes) {
    IN_CONTEXT;
    if (!is_device(start, bytes)) return INVALID_VALUE;
    memset((void *)start, value, bytes);
    return OK;
}

#define ENTRY(name) {#name, name}
#define ENTRY_AS(said, name) {said, name}
static const struct { const char *name; void *function; } entries[] = {
    ENTRY(cuInit), ENTRY(cuDriverGetVersion), ENTRY(cuDeviceGetCount), ENTRY(cuDeviceGet), ENTRY(cuDeviceGetName),
    ENTRY_AS("cuDeviceGetUuid", cuDeviceGetUuid_v2), ENTRY_AS("cuDeviceTotalMem", cuDeviceTotalMem_v2),
    ENTRY(cuDeviceGetAttribute), ENTRY_AS("cuMemGetInfo", cuMemGetInfo_v2), ENTRY(cuDevicePrimaryCtxRetain),
    ENTRY_AS("cuDevicePrimaryCtxRelease", cuDevicePrimaryCtxRelease_v2), ENTRY(cuDevicePrimaryCtxGetState),
    ENTRY(cuCtxSetCurrent), ENTRY(cuCtxGetCurrent), ENTRY_AS("cuCtxPushCurrent", cuCtxPushCurrent_v2),
    ENTRY_AS("cuCtxPopCurrent", cuCtxPopCurrent_v2), ENTRY(cuCtxGetDevice), ENTRY(cuCtxGetStreamPriorityRange),
    ENTRY(cuGetErrorName), ENTRY(cuGetErrorString), ENTRY(cuMemGetAllocationGranularity), ENTRY(cuMemCreate),
    ENTRY(cuMemRelease), ENTRY(cuMemExportToShareableHandle), ENTRY(cuMemImportFromShareableHandle),
    ENTRY(cuMemAddressReserve), ENTRY(cuMemAddressFree), ENTRY(cuMemMap), ENTRY(cuMemUnmap), ENTRY(cuMemSetAccess),
    ENTRY_AS("cuMemHostRegister", cuMemHostRegister_v2), ENTRY(cuMemHostUnregister),
    ENTRY(cuStreamCreateWithPriority), ENTRY_AS("cuStreamDestroy", cuStreamDestroy_v2), ENTRY(cuStreamGetPriority),
    ENTRY(cuStreamGetFlags), ENTRY(cuStreamGetCtx), ENTRY(cuStreamSynchronize), ENTRY(cuCtxSynchronize),
    ENTRY(cuEventCreate), ENTRY_AS("cuEventDestroy", cuEventDestroy_v2), ENTRY(cuEventRecord), ENTRY(cuEventQuery),
    ENTRY(cuEventSynchronize), ENTRY(cuMemcpyAsync), ENTRY(cuMemcpyBatchAsync), ENTRY(cuMemsetD8Async),
    ENTRY_AS("cuMemsetD8", cuMemsetD8_v2),
};

Result cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    (void)flags;
    *function = NULL;
    if (status) *status = 1;
    if (number("KVLEASE_STANDIN_NO_BATCH", 0) && !strcmp(name, "cuMemcpyBatchAsync")) return NOT_FOUND;
    if (!strcmp(name, "cuGetProcAddress")) *function = cuGetProcAddress_v2;
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
        if (!strcmp(name, entries[i].name)) *function = entries[i].function;
    if (version >= 13000 && *function == (void *)cuMemcpyBatchAsync) *function = (void *)cuMemcpyBatchAsync_v2;
    if (*function && status) *status = 0;
    return *function ? OK : NOT_FOUND;
}
