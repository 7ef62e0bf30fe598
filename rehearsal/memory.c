/* Device memory: parts of one sparse file, which the processes of other ranks can map. Pinned memory: a list of ranges. */
#define _GNU_SOURCE
#include "internal.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define ARENA ((size_t)1 << 41) /* Addresses: an expandable segment reserves more than a device has, for each stream. */
#define GRANULE ((size_t)2 << 20) /* Of cudaMalloc. */
#define POISON 0xFF               /* NaN in every floating-point type: memory that is read before it is written shows. */

typedef struct {
    char *at;
    size_t nbytes;
    int device;
} block;

static char *arena;
static int arena_file = -1;
static block *blocks; /* In the order of addresses. */
static size_t block_count, block_room;
static size_t used[64];
static struct { int process; char *at; } peers[256]; /* Arenas of other processes. */
static int peer_count;

typedef struct pinned {
    struct pinned *next;
    char *at;
    size_t nbytes;
    bool is_owned;
} pinned;
static pinned *pinned_ranges;

static void open_arena(void)
{
    if (arena)
        return;
    arena_file = memfd_create("rehearsal-device-memory", MFD_CLOEXEC);
    if (arena_file < 0 || ftruncate(arena_file, ARENA) != 0) {
        perror("rehearsal: memfd_create");
        abort();
    }
    arena = mmap(NULL, ARENA, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, arena_file, 0);
    if (arena == MAP_FAILED) {
        perror("rehearsal: mmap of device memory");
        abort();
    }
}

size_t device_total(void)
{
    const char *total = getenv("REHEARSAL_MEMORY"); /* In MiB. */
    return (total ? strtoull(total, NULL, 10) : rehearsal_is_null() ? 81559 : 4096) << 20; /* An H100's. */
}

size_t device_used(int device) { return used[device]; }

bool device_use(size_t nbytes, int device)
{
    bool fits = used[device] + nbytes <= device_total();
    used[device] += fits ? nbytes : 0;
    return fits;
}

void device_unuse(size_t nbytes, int device) { used[device] -= nbytes; }

void device_fresh(void *at, size_t nbytes)
{
    if (nbytes <= (size_t)64 << 20 && !rehearsal_is_null())
        memset(at, POISON, nbytes);
}

void device_drop_pages(void *at, size_t nbytes)
{
    fallocate(arena_file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (char *)at - arena, (off_t)nbytes);
}

/* The first addresses that are free. */
void *device_reserve(size_t nbytes, int device)
{
    size_t rounded = (nbytes + GRANULE - 1) / GRANULE * GRANULE, index = 0;
    open_arena();
    char *free_at = arena;
    for (; index < block_count && (size_t)(blocks[index].at - free_at) < rounded; index++)
        free_at = blocks[index].at + blocks[index].nbytes;
    if (free_at + rounded > arena + ARENA)
        return NULL;
    if (block_count == block_room)
        blocks = realloc(blocks, (block_room = block_room * 2 + 64) * sizeof *blocks);
    memmove(blocks + index + 1, blocks + index, (block_count++ - index) * sizeof *blocks);
    blocks[index] = (block){free_at, rounded, device};
    return free_at;
}

cudaError_t device_malloc(void **at, size_t nbytes, int device)
{
    size_t rounded = (nbytes + GRANULE - 1) / GRANULE * GRANULE;
    *at = NULL;
    if (nbytes == 0)
        return cudaSuccess;
    if (!device_use(rounded, device))
        return cudaErrorMemoryAllocation;
    *at = device_reserve(nbytes, device);
    if (!*at) {
        device_unuse(rounded, device);
        return cudaErrorMemoryAllocation;
    }
    device_fresh(*at, rounded);
    return cudaSuccess;
}

static block *find(const void *at)
{
    size_t low = 0, high = block_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if ((const char *)at < blocks[middle].at)
            high = middle;
        else if ((const char *)at >= blocks[middle].at + blocks[middle].nbytes)
            low = middle + 1;
        else
            return &blocks[middle];
    }
    return NULL;
}

bool device_unreserve(void *at)
{
    block *found = find(at);
    if (!found || found->at != at)
        return false;
    memmove(found, found + 1, (size_t)(blocks + --block_count - found) * sizeof *blocks);
    return true;
}

cudaError_t device_free(void *at)
{
    block *found = find(at);
    if (!found || found->at != at)
        return cudaErrorInvalidValue;
    device_unuse(found->nbytes, found->device);
    device_drop_pages(found->at, found->nbytes);
    device_unreserve(at);
    return cudaSuccess;
}

/* The memory of another process counts as memory of a device, too. */
int device_of(const void *at)
{
    block *found = find(at);
    for (int i = 0; i < peer_count && !found; i++)
        if ((const char *)at >= peers[i].at && (const char *)at < peers[i].at + ARENA)
            return 0;
    return found ? found->device : -1;
}

void *allocation_base(const void *at, size_t *nbytes)
{
    block *found = find(at);
    *nbytes = found ? found->nbytes : 0;
    return found ? found->at : NULL;
}

int rehearsal_memory_file(void)
{
    lock();
    open_arena();
    unlock();
    return arena_file;
}

int64_t rehearsal_offset(const void *at, size_t nbytes)
{
    lock();
    block *found = find(at);
    bool is_inside = found && (const char *)at + nbytes <= found->at + found->nbytes;
    unlock();
    return is_inside ? (const char *)at - arena : -1;
}

char *rehearsal_peer_memory(int process, int file)
{
    char *found = NULL, path[64];
    lock();
    open_arena();
    if (process == getpid())
        found = arena;
    for (int i = 0; i < peer_count && !found; i++)
        if (peers[i].process == process)
            found = peers[i].at;
    if (!found && peer_count < 256) {
        snprintf(path, sizeof path, "/proc/%d/fd/%d", process, file);
        int opened = open(path, O_RDWR | O_CLOEXEC);
        if (opened >= 0) {
            found = mmap(NULL, ARENA, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, opened, 0);
            close(opened);
            if (found == MAP_FAILED)
                found = NULL;
            else
                peers[peer_count].process = process, peers[peer_count++].at = found;
        }
    }
    unlock();
    return found;
}

/* --- pinned memory ------------------------------------------------------------------------------------------------- */

cudaError_t host_register(void *at, size_t nbytes, bool is_owned)
{
    pinned *range = malloc(sizeof *range);
    *range = (pinned){pinned_ranges, at, nbytes, is_owned};
    pinned_ranges = range;
    return cudaSuccess;
}

cudaError_t host_unregister(void *at)
{
    for (pinned **range = &pinned_ranges; *range; range = &(*range)->next)
        if ((*range)->at == at) {
            pinned *found = *range;
            *range = found->next;
            if (found->is_owned)
                free(found->at);
            free(found);
            return cudaSuccess;
        }
    return cudaErrorInvalidValue;
}

bool host_is_pinned(const void *at)
{
    for (pinned *range = pinned_ranges; range; range = range->next)
        if ((const char *)at >= range->at && (const char *)at < range->at + range->nbytes)
            return true;
    return false;
}
