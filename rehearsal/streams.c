/* Streams: queues of operations, which run when somebody waits, in an order that a seed chooses.
 *
 * late    An operation runs only if the host, or another rank, waits for it, and only with what it waits for itself.
 * early   An operation runs when it is issued, or as soon as what it waits for is complete.
 * random  Between two calls, and while the host waits, streams take turns that the seed chooses.
 *
 * One operation runs at a time, in the thread that waits. A collective never runs at issue, or this rank would block where a GPU
 * does not: it runs if the host waits for it, or if another rank does.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum order { LATE, EARLY, RANDOM };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static bool is_running; /* An operation runs, without the lock. */
static cudaStream_t streams;
static int stream_count;
static uint64_t ticks;
static enum order order;
static uint64_t random_state;
static char failure_text[8192];
static rehearsal_demand find_demand;
static rehearsal_site find_site;
static uint64_t counters[REHEARSAL_COUNTERS];
static volatile uint64_t calls; /* Of threads that launch: the helper sees by it whether the host is idle. */
static __thread bool has_launched, is_executing;
static volatile int launching_thread; /* The last one. */
__thread int current_device;

#define DEVICES 64
static cudaStream_t default_streams[DEVICES];

__attribute__((constructor)) static void configure(void)
{
    const char *name = getenv("REHEARSAL_ORDER"), *seed = getenv("REHEARSAL_SEED");
    order = !name || !strcmp(name, "late") ? LATE : !strcmp(name, "early") ? EARLY : RANDOM;
    if (name && order == RANDOM && strcmp(name, "random")) {
        fprintf(stderr, "REHEARSAL_ORDER is late, early or random, got %s\n", name);
        abort();
    }
    random_state = (seed ? strtoull(seed, NULL, 10) : 0) * 0x9E3779B97F4A7C15u + 0x853C49E6748FEA9Bu;
}

void lock(void)
{
    pthread_mutex_lock(&mutex);
    calls += has_launched;
}

void unlock(void) { pthread_mutex_unlock(&mutex); }

static uint32_t draw(uint32_t below)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((random_state >> 33) % below);
}

int device_count(void)
{
    const char *count = getenv("REHEARSAL_DEVICES");
    return count ? atoi(count) : 8;
}

void rehearsal_set_site(rehearsal_site find) { find_site = find; }
const char *rehearsal_where(void) { return find_site && !is_executing ? find_site() : "(unknown)"; }
void rehearsal_count(int counter) { __atomic_add_fetch(&counters[counter], 1, __ATOMIC_RELAXED); }

void rehearsal_counts(uint64_t *into, int reset)
{
    lock();
    memcpy(into, counters, sizeof counters);
    if (reset)
        memset(counters, 0, sizeof counters);
    unlock();
}

void rehearsal_fail(const char *format, ...)
{
    char text[sizeof failure_text];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    pthread_mutex_lock(&mutex);
    fail_locked(text);
    pthread_mutex_unlock(&mutex);
}

void fail_locked(const char *text)
{
    if (!failure_text[0]) {
        snprintf(failure_text, sizeof failure_text, "%s", text);
        fprintf(stderr, "rehearsed: %s\n", text);
    }
    pthread_cond_broadcast(&changed);
}

cudaStream_t all_streams(void) { return streams; }

const char *failure(void) { return failure_text[0] ? failure_text : NULL; }

/* --- streams and moments ------------------------------------------------------------------------------------------- */

cudaStream_t new_stream(int device, unsigned flags, int priority)
{
    cudaStream_t stream = calloc(1, sizeof *stream), *last = &streams;
    stream->index = stream_count++;
    stream->device = device, stream->flags = flags, stream->priority = priority;
    while (*last)
        last = &(*last)->next;
    return *last = stream;
}

/* The stream of a handle; the default stream has the handles 0, 1 (legacy) and 2 (of a thread). */
cudaStream_t stream_of(cudaStream_t handle)
{
    if ((uintptr_t)handle > 2)
        return handle;
    if (!default_streams[current_device])
        default_streams[current_device] = new_stream(current_device, cudaStreamNonBlocking, 0);
    return default_streams[current_device];
}

/* Its operations run as before. It is never freed: the sanitizer's records name it. */
void destroy_stream(cudaStream_t stream) { stream->is_destroyed = true; }

void drop_marker(marker *moment)
{
    if (moment && --moment->references == 0) {
        check_free_clock(moment->clock);
        free(moment);
    }
}

/* --- running ------------------------------------------------------------------------------------------------------- */

/* Run the first operation of a stream. */
static int run_head(cudaStream_t stream)
{
    operation *head = stream->head;
    if (head->waits_for && !head->waits_for->is_done)
        return REHEARSAL_BLOCKED;
    if (head->run) {
        is_running = true;
        unlock();
        is_executing = true;
        int result = head->run(head->argument);
        is_executing = false;
        lock();
        is_running = false;
        pthread_cond_broadcast(&changed);
        if (result == REHEARSAL_BLOCKED)
            return result;
    }
    stream->head = head->next;
    if (!stream->head)
        stream->tail = NULL;
    stream->done = head->number;
    ticks++;
    if (head->reaches) {
        head->reaches->is_done = true;
        head->reaches->tick = ticks;
        drop_marker(head->reaches);
    }
    drop_marker(head->waits_for);
    if (head->drop) {
        is_running = is_executing = true; /* Without the lock: it may call back, as a destructor of a tensor does. */
        unlock();
        head->drop(head->argument);
        lock();
        is_executing = false;
        is_running = false;
        pthread_cond_broadcast(&changed);
    }
    free(head);
    return REHEARSAL_DONE;
}

/* The stream whose first operation must run next, for the first one of ``stream``. */
static cudaStream_t needed(cudaStream_t stream)
{
    while (stream->head->waits_for && !stream->head->waits_for->is_done)
        stream = stream->head->waits_for->stream;
    return stream;
}

/* Whether the first operation of a stream can run, and does not depend on other ranks. */
static bool is_free(cudaStream_t stream)
{
    operation *head = stream->head;
    return head && !head->waits_for_peers && (!head->waits_for || head->waits_for->is_done);
}

/* Run one operation, of a stream that the seed chooses: of those that are free and, if given, of ``wanted``. */
static int run_any(cudaStream_t wanted)
{
    cudaStream_t chosen = wanted;
    uint32_t seen = wanted ? 1 : 0;
    for (cudaStream_t stream = streams; stream; stream = stream->next)
        if (stream != wanted && is_free(stream) && draw(++seen) == 0)
            chosen = stream;
    return chosen ? run_head(chosen) : REHEARSAL_BLOCKED;
}

/* Run what can run of all streams, collectives too if their ranks are there. */
static int run_early(void)
{
    int result = REHEARSAL_BLOCKED;
    bool is_moving = true;
    while (is_moving && !failure()) {
        is_moving = false;
        for (cudaStream_t stream = streams; stream; stream = stream->next)
            while (stream->head && run_head(stream) == REHEARSAL_DONE)
                is_moving = true, result = REHEARSAL_DONE;
    }
    return result;
}

/* Run an operation towards one that another rank waits for. */
static int run_demanded(void)
{
    cudaStream_t stream;
    uint64_t number;
    if (!find_demand || !find_demand(&stream, &number))
        return REHEARSAL_BLOCKED;
    if (stream->done >= number || number > stream->issued)
        return REHEARSAL_BLOCKED;
    return run_head(needed(stream));
}

static int advance(cudaStream_t goal)
{
    int result;
    if (order == EARLY)
        return run_early();
    result = order == RANDOM ? run_any(needed(goal)) : run_head(needed(goal));
    return result == REHEARSAL_DONE ? result : run_demanded();
}

static void pause_locked(void)
{
    unlock();
    usleep(50);
    lock();
}

/* With the lock held. The lock is free while an operation runs, or another rank is waited for. */
cudaError_t run_until(cudaStream_t stream, uint64_t number)
{
    while (stream->done < number) {
        if (failure())
            return cudaErrorLaunchFailure;
        if (is_running) {
            if (is_executing)
                return cudaErrorNotPermitted; /* An operation cannot wait for its own stream. */
            pthread_cond_wait(&changed, &mutex);
        } else if (advance(stream) == REHEARSAL_BLOCKED) {
            pause_locked();
        }
    }
    return failure() ? cudaErrorLaunchFailure : cudaSuccess;
}

cudaError_t run_all(void)
{
    cudaError_t result = cudaSuccess;
    for (cudaStream_t stream = streams; stream && result == cudaSuccess; stream = stream->next)
        result = run_until(stream, stream->issued);
    return result;
}

/* Whether a stream has reached ``number``. A loop that asks again and again gets there; a thread that launches nothing, as the
 * watchdog of a process group, moves nothing. */
bool poll_until(cudaStream_t stream, uint64_t number, unsigned *queries)
{
    if (stream->done < number && has_launched && !is_running && !is_executing && ++*queries >= 32 && stream->head)
        advance(stream);
    return stream->done >= number;
}

cudaStream_t rehearsal_stream(cudaStream_t handle)
{
    lock();
    cudaStream_t stream = stream_of(handle);
    unlock();
    return stream;
}

cudaError_t rehearsal_run_until(cudaStream_t stream, uint64_t number)
{
    lock();
    cudaError_t result = run_until(stream, number);
    unlock();
    return result;
}

/* Whether the thread that launched last sleeps: it waits for something else than the device. A thread that only has no processor does
 * not sleep, so a loaded machine does not change the order. */
static bool host_sleeps(void)
{
    char path[64], text[512], *state;
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", launching_thread);
    FILE *file = fopen(path, "r");
    size_t length = file ? fread(text, 1, sizeof text - 1, file) : 0;
    if (file)
        fclose(file);
    text[length] = '\0';
    state = strrchr(text, ')');
    return !state || state[2] == 'S'; /* A thread that has ended launches no more. */
}

/* The helper. Another rank may wait for a collective of this one while this one's host waits elsewhere, in a store or in gloo. And
 * nothing is late for ever: a watchdog would end the process. */
static void *help(void *unused)
{
    uint64_t seen = 0;
    for (unsigned idle = 0;;) {
        usleep(2000);
        pthread_mutex_lock(&mutex);
        idle = calls == seen && !is_running && !failure() && host_sleeps() ? idle + 1 : 0;
        if (idle >= 2)
            for (int i = 0; i < 64 && (order == EARLY ? run_early() : run_demanded()) == REHEARSAL_DONE; i++)
                ;
        if (idle >= 5000)
            run_early();
        seen = calls;
        pthread_mutex_unlock(&mutex);
    }
    return unused;
}

void rehearsal_on_demand(rehearsal_demand find)
{
    static bool is_started;
    pthread_t thread;
    lock();
    find_demand = find;
    if (!is_started && pthread_create(&thread, NULL, help, NULL) == 0) {
        pthread_detach(thread);
        is_started = true;
    }
    unlock();
}

/* --- issuing ------------------------------------------------------------------------------------------------------- */

uint64_t enqueue(cudaStream_t stream, operation *new_operation)
{
    if (!has_launched || launching_thread != gettid())
        launching_thread = gettid();
    has_launched = true;
    new_operation->number = ++stream->issued;
    if (stream->tail)
        stream->tail->next = new_operation;
    else
        stream->head = new_operation;
    stream->tail = new_operation;
    uint64_t number = new_operation->number; /* It may be gone below. */
    if (!is_running && !is_executing && !failure()) {
        if (order == EARLY)
            run_early();
        else if (order == RANDOM)
            while (draw(4) == 0 && run_any(NULL) == REHEARSAL_DONE)
                ;
    }
    return number;
}

uint64_t rehearsal_launch(cudaStream_t handle, const char *name, rehearsal_run run, rehearsal_drop drop, void *argument,
                          const rehearsal_access *accesses, size_t count, int ranks)
{
    const char *site = rehearsal_is_null() ? "(null device)" : rehearsal_where();
    operation *launched = calloc(1, sizeof *launched);
    lock();
    cudaStream_t stream = stream_of(handle);
    launched->name = name, launched->site = site, launched->run = run, launched->drop = drop, launched->argument = argument;
    launched->waits_for_peers = ranks != 0;
    check_launch(stream, launched, accesses, count);
    rehearsal_count(ranks ? REHEARSAL_COLLECTIVES : REHEARSAL_LAUNCHES);
    trace_launch(stream, name, stream->issued + 1, accesses, count, ranks);
    uint64_t number = enqueue(stream, launched);
    unlock();
    return number;
}

marker *record(cudaStream_t stream)
{
    marker *moment = calloc(1, sizeof *moment);
    operation *reached = calloc(1, sizeof *reached);
    moment->references = 2; /* The event's, and the operation's. */
    moment->stream = stream, moment->number = stream->issued + 1;
    reached->name = "event", reached->reaches = moment;
    check_record(stream, moment);
    trace_record(moment);
    enqueue(stream, reached);
    return moment;
}

void wait_marker(cudaStream_t stream, marker *moment)
{
    check_wait(stream, moment);
    trace_wait(stream, moment);
    if (moment->is_done)
        return;
    operation *waiting = calloc(1, sizeof *waiting);
    moment->references++;
    waiting->name = "wait", waiting->waits_for = moment;
    enqueue(stream, waiting);
}

void *rehearsal_mark(cudaStream_t stream)
{
    lock();
    marker *moment = record(stream_of(stream));
    unlock();
    return moment;
}

void rehearsal_order_behind(cudaStream_t stream, void *mark)
{
    lock();
    wait_marker(stream_of(stream), mark);
    unlock();
}

void rehearsal_drop_mark(void *mark)
{
    lock();
    drop_marker(mark);
    unlock();
}
