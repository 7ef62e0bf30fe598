/* The null device, and the trace: what is issued, in the order of the calls.
 *
 * A null device keeps torch's allocator, streams and events, and runs nothing. Its memory has addresses and no pages, so one rank of
 * a large model fits in a small machine. The host reads zero, but for small tensors that it has written itself. NCCL's ranks are alone: a collective needs no other process.
 *
 * The trace does not run anything either. It says what was issued on which stream, and which event orders it.
 */
#include "internal.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

static rehearsal_entry *entries;
static size_t entry_count, entry_room;
static volatile bool is_tracing;
static uint64_t stand_in_ns;
static __thread uint64_t entered_at;
static __thread unsigned depth;
static __thread double next_work;

bool rehearsal_is_null(void)
{
    static int known = -1;
    if (known < 0) {
        const char *text = getenv("REHEARSAL_NULL");
        known = text && strcmp(text, "1") == 0;
    }
    return known;
}

static uint64_t cpu_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Torch calls kernels from one thread at a time in a training step, so the process's time is that of the calling thread. */
void rehearsal_enter(void)
{
    if (depth++ == 0)
        entered_at = cpu_ns();
}

void rehearsal_leave(void)
{
    if (--depth == 0)
        __atomic_add_fetch(&stand_in_ns, cpu_ns() - entered_at, __ATOMIC_RELAXED);
}

uint64_t rehearsal_stand_in_ns(void) { return __atomic_load_n(&stand_in_ns, __ATOMIC_RELAXED); }

void rehearsal_set_work(double operations) { next_work = operations; }
bool rehearsal_is_traced(void) { return is_tracing; }

void rehearsal_trace(int on)
{
    lock();
    is_tracing = on != 0;
    entry_count = on ? 0 : entry_count;
    unlock();
}

size_t rehearsal_traced(const rehearsal_entry **found)
{
    *found = entries;
    return entry_count;
}

/* With the lock held. */
static rehearsal_entry *add(int kind, const char *name, cudaStream_t stream, uint64_t number)
{
    if (entry_count == entry_room)
        entries = realloc(entries, (entry_room = entry_room * 2 + 1024) * sizeof *entries);
    rehearsal_entry *it = &entries[entry_count++];
    *it = (rehearsal_entry){.kind = kind, .name = name, .stream = stream ? stream->index : -1, .number = number};
    it->host_ns = cpu_ns() - rehearsal_stand_in_ns() - (depth ? cpu_ns() - entered_at : 0);
    return it;
}

void trace_launch(cudaStream_t stream, const char *name, uint64_t number, const rehearsal_access *accesses, size_t count, int ranks)
{
    double work = next_work;
    next_work = 0;
    if (!is_tracing)
        return;
    rehearsal_entry *it = add(REHEARSAL_LAUNCHED, name, stream, number);
    it->work = work, it->ranks = ranks;
    for (size_t i = 0; i < count; i++)
        *(accesses[i].is_write ? &it->written : &it->read) += accesses[i].nbytes;
}

void trace_record(const marker *moment)
{
    if (is_tracing)
        add(REHEARSAL_RECORDED, "record", moment->stream, moment->number);
}

void trace_wait(cudaStream_t stream, const marker *moment)
{
    if (!is_tracing)
        return;
    rehearsal_entry *it = add(REHEARSAL_WAITED, "wait", stream, moment->number);
    it->on = moment->stream->index;
}

void trace_host_wait(cudaStream_t stream, uint64_t number)
{
    if (is_tracing)
        add(REHEARSAL_HOST_WAITED, "host wait", stream, number);
}
