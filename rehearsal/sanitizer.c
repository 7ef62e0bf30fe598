/* The sanitizer: reports accesses of memory that no event orders.
 *
 * It follows what is issued, not what runs, so its reports do not depend on the order that the seed chooses. Each stream has a vector
 * clock: for each stream, the number of its operations that are ordered before the next one of this stream. An event carries the
 * clock of its stream, a wait joins it, and so does the host when it waits. For each part of memory, the last write and the last
 * read of each stream since are kept. An access must be ordered behind the write, and a write behind the reads too.
 */
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STREAMS = 512, KNOWN_REPORTS = 1024 };

struct clock {
    uint64_t at[STREAMS]; /* By stream: the operations up to this number are ordered before. */
    int count;
};

typedef struct {
    int stream;
    uint64_t number, generation;
    const char *name, *site;
} access_record;

/* A part of memory whose bytes have the same history. */
typedef struct {
    char *from, *to;
    access_record write; /* stream < 0: not written. */
    access_record *reads;
    int read_count;
} part;

typedef struct {
    char *from, *to;
    uint64_t generation;
    const char *allocated, *freed;
} allocation;

static enum { OFF, REPORT, FAIL } mode;
static struct clock host;
static part *parts; /* In the order of addresses; they do not overlap. */
static size_t part_count, part_room;
static allocation *allocations;
static size_t allocation_count, allocation_room;
static uint64_t generation;
static uint64_t reports;
static struct { const char *first, *second; } known[KNOWN_REPORTS];

__attribute__((constructor)) static void configure(void)
{
    const char *name = getenv("REHEARSAL_CHECK");
    mode = !name || !*name || !strcmp(name, "off") ? OFF : !strcmp(name, "fail") ? FAIL : REPORT;
}

uint64_t rehearsal_reports(void) { return reports; }

/* --- clocks -------------------------------------------------------------------------------------------------------- */

static void join(struct clock *into, const struct clock *from)
{
    for (int i = 0; i < from->count; i++)
        if (into->at[i] < from->at[i])
            into->at[i] = from->at[i];
    if (into->count < from->count)
        into->count = from->count;
}

/* The stream's clock; operations that the host has waited for are ordered before whatever it issues now. */
static struct clock *clock_of(cudaStream_t stream)
{
    if (stream->index >= STREAMS) {
        fprintf(stderr, "rehearsed: the sanitizer follows at most %d streams\n", STREAMS);
        abort();
    }
    if (!stream->clock)
        stream->clock = calloc(1, sizeof *stream->clock);
    join(stream->clock, &host);
    if (stream->clock->count <= stream->index)
        stream->clock->count = stream->index + 1;
    return stream->clock;
}

void check_record(cudaStream_t stream, marker *moment)
{
    if (mode == OFF)
        return;
    struct clock *now = clock_of(stream);
    now->at[stream->index] = stream->issued + 1;
    moment->clock = malloc(sizeof *moment->clock);
    *moment->clock = *now;
}

void check_wait(cudaStream_t stream, const marker *moment)
{
    if (mode != OFF && moment->clock)
        join(clock_of(stream), moment->clock);
}

void check_free_clock(struct clock *clock) { free(clock); }

void check_host_waits(cudaStream_t stream, const marker *moment)
{
    if (mode == OFF)
        return;
    if (moment) {
        if (moment->clock)
            join(&host, moment->clock);
    } else if (stream) {
        struct clock *now = clock_of(stream);
        now->at[stream->index] = stream->issued;
        join(&host, now);
    } else {
        for (cudaStream_t each = all_streams(); each; each = each->next)
            check_host_waits(each, NULL);
    }
}

/* --- allocations of torch's caching allocator ---------------------------------------------------------------------- */

static size_t first_allocation(const char *after)
{
    size_t low = 0, high = allocation_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (allocations[middle].to <= after)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

void rehearsal_note_allocation(void *at, size_t nbytes, const char *site)
{
    if (mode == OFF)
        return;
    lock();
    char *from = at, *to = from + nbytes;
    size_t first = first_allocation(from), last = first;
    const char *freed = NULL;
    while (last < allocation_count && allocations[last].from < to)
        freed = allocations[last++].freed;
    size_t rest = allocation_count - last;
    if (allocation_count + 1 > allocation_room)
        allocations = realloc(allocations, (allocation_room = allocation_room * 2 + 256) * sizeof *allocations);
    memmove(allocations + first + 1, allocations + last, rest * sizeof *allocations);
    allocations[first] = (allocation){from, to, ++generation, site, freed};
    allocation_count = first + 1 + rest;
    unlock();
}

void rehearsal_note_free(void *at, const char *site)
{
    if (mode == OFF)
        return;
    lock();
    size_t found = first_allocation(at);
    if (found < allocation_count && allocations[found].from == at)
        allocations[found].freed = site;
    unlock();
}

/* --- accesses ------------------------------------------------------------------------------------------------------ */

static void report(const part *where, const access_record *before, bool before_writes, const access_record *now, bool writes)
{
    char reuse[2200] = "", text[6000];
    reports++;
    for (int i = 0; i < KNOWN_REPORTS && i < (int)reports - 1; i++)
        if (known[i].first == before->site && known[i].second == now->site)
            return;
    known[(reports - 1) % KNOWN_REPORTS].first = before->site, known[(reports - 1) % KNOWN_REPORTS].second = now->site;
    size_t found = first_allocation(where->from);
    if (found < allocation_count && allocations[found].from <= where->from && allocations[found].generation > before->generation)
        snprintf(reuse, sizeof reuse, "\n  The allocator gave this memory out again, at %.1000s\n  after it was freed at %.1000s",
                 allocations[found].allocated, allocations[found].freed ? allocations[found].freed : "(unknown)");
    snprintf(text, sizeof text,
             "sanitizer: no event orders two accesses of %zu bytes at %p:\n  %s by %s on stream %d, at %.1000s\n"
             "  %s by %s on stream %d, at %.1000s%s",
             (size_t)(where->to - where->from), (void *)where->from, before_writes ? "write" : "read", before->name,
             before->stream, before->site, writes ? "write" : "read", now->name, now->stream, now->site, reuse);
    if (mode == FAIL)
        fail_locked(text);
    else
        fprintf(stderr, "rehearsed: %s\n", text);
}

static size_t first_part(const char *after)
{
    size_t low = 0, high = part_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (parts[middle].to <= after)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void insert_part(size_t index, part added)
{
    if (part_count == part_room)
        parts = realloc(parts, (part_room = part_room * 2 + 1024) * sizeof *parts);
    memmove(parts + index + 1, parts + index, (part_count++ - index) * sizeof *parts);
    parts[index] = added;
}

/* Cut the part at ``index`` in two at an address inside it. */
static void cut(size_t index, char *at)
{
    part second = parts[index];
    if (second.read_count) {
        second.reads = malloc((size_t)second.read_count * sizeof *second.reads);
        memcpy(second.reads, parts[index].reads, (size_t)second.read_count * sizeof *second.reads);
    }
    second.from = at;
    parts[index].to = at;
    insert_part(index + 1, second);
}

static bool is_ordered(const struct clock *now, const access_record *before, int stream)
{
    return before->stream < 0 || before->stream == stream || now->at[before->stream] >= before->number;
}

static void check_access(const struct clock *now, const access_record *record, char *from, char *to, bool writes)
{
    size_t first = first_part(from), last;
    if (first < part_count && parts[first].from < from)
        cut(first, from), first++;
    for (last = first; last < part_count && parts[last].from < to; last++) {
        if (parts[last].to > to)
            cut(last, to);
        part *it = &parts[last];
        if (!is_ordered(now, &it->write, record->stream))
            report(it, &it->write, true, record, writes);
        for (int i = 0; writes && i < it->read_count; i++)
            if (!is_ordered(now, &it->reads[i], record->stream))
                report(it, &it->reads[i], false, record, writes);
    }
    if (writes) { /* One part, with this write as its history. */
        for (size_t i = first; i < last; i++)
            free(parts[i].reads);
        part whole = {from, to, *record, NULL, 0};
        if (last == first) {
            insert_part(first, whole);
        } else {
            parts[first] = whole;
            memmove(parts + first + 1, parts + last, (part_count - last) * sizeof *parts);
            part_count -= last - first - 1;
        }
        return;
    }
    for (size_t i = first; from < to; i++) {
        if (i == part_count || parts[i].from > from) { /* Memory without a history. */
            char *end = i == part_count || parts[i].from > to ? to : parts[i].from;
            insert_part(i, (part){from, end, {.stream = -1}, NULL, 0});
        }
        part *it = &parts[i];
        int slot = 0;
        while (slot < it->read_count && it->reads[slot].stream != record->stream)
            slot++;
        if (slot == it->read_count)
            it->reads = realloc(it->reads, (size_t)++it->read_count * sizeof *it->reads);
        it->reads[slot] = *record;
        from = it->to;
    }
}

void check_launch(cudaStream_t stream, const operation *launched, const rehearsal_access *accesses, size_t count)
{
    if (mode == OFF)
        return;
    struct clock *now = clock_of(stream);
    access_record record = {stream->index, stream->issued + 1, generation, launched->name, launched->site};
    now->at[stream->index] = record.number;
    for (int writes = 0; writes < 2; writes++) /* An operation reads before it writes. */
        for (size_t i = 0; i < count; i++)
            if (accesses[i].is_write == writes && accesses[i].nbytes)
                check_access(now, &record, (char *)accesses[i].at, (char *)accesses[i].at + accesses[i].nbytes, writes);
}

/* Memory that cudaFree has taken has no history: cudaFree waits for the device. */
void check_forget(void *at, size_t nbytes)
{
    if (mode == OFF)
        return;
    size_t first = first_part(at), last = first;
    char *to = (char *)at + nbytes;
    while (last < part_count && parts[last].from < to)
        free(parts[last++].reads);
    memmove(parts + first, parts + last, (part_count - last) * sizeof *parts);
    part_count -= last - first;
}
