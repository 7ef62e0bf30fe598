/* libnccl.so.2: collectives of several processes, on the streams of libcudart.so.13.
 *
 * A communicator is a small file of shared memory. In it, each rank says which collectives it has issued, which it is ready to run
 * (its stream has reached it), and which it has finished. Ranks read each other's device memory directly: a rank that is ready reads
 * the inputs when all ranks are, and writes its output when all have read.
 *
 * NCCL checks little, and a mismatch hangs or mixes bytes. Here ranks compare what they issue, number by number: kind, counts, dtype,
 * op and root. Where they differ, each rank gets an error with both calls and where they come from.
 */
#define _GNU_SOURCE
#include "device.h"

/* nccl.h needs these headers for device code only, and they need one more package. */
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include <nccl.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

enum { RING = 256, SITE = 400, MAX_RANKS = 16 };

enum kind { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, ALL_TO_ALL, SEND, RECEIVE };
static const char *const kind_names[] = {"ncclAllReduce", "ncclAllGather", "ncclReduceScatter", "ncclBroadcast",
                                         "ncclReduce",    "ncclAlltoAll",  "ncclSend",          "ncclRecv"};

/* What must be equal on all ranks, and where the call comes from. */
typedef struct {
    int kind, dtype, op, root;
    uint64_t count;
    int64_t input; /* Offset in the rank's device memory, once it is ready. */
    char site[SITE];
} call;

/* One message of a pair of ranks at a time. */
typedef struct {
    _Atomic uint64_t sent, received; /* Messages that are ready to be read, and that are read. */
    int64_t input;
    uint64_t count;
    int dtype;
    char site[SITE];
} channel;

typedef struct {
    _Atomic int process, file, has_left;
    _Atomic uint64_t issued, ready, copied, finished; /* Numbers of collectives. */
    _Atomic uint64_t splits;
    int color, key;
    call calls[RING];
} member;

typedef struct {
    _Atomic int is_broken, mapped;
    char report[4096]; /* Why it is broken. */
    member members[MAX_RANKS];
    channel channels[MAX_RANKS][MAX_RANKS]; /* From, to. */
} shared;

struct ncclComm {
    struct ncclComm *next;
    shared *shared;
    char name[64];
    int rank, size, device;
    uint64_t issued, splits;
    uint64_t sent[MAX_RANKS], received[MAX_RANKS]; /* Messages that this rank has issued. */
    cudaStream_t stream_of[RING];                  /* Of collectives that this rank has issued; with their numbers there. */
    uint64_t number_of[RING];
    cudaStream_t last_stream;                      /* Of its last operation. */
    void *last_mark;                               /* After it. */
    struct exchange *exchanges; /* Grouped sends and receives that have not run. */
    _Atomic bool is_aborted;
    double scalars[64]; /* Of ncclRedOpCreatePreMulSum. */
    bool has_scalar[64];
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static ncclComm_t communicators;
static __thread char last_error[4096];

static ncclResult_t refuse(ncclResult_t code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    fprintf(stderr, "rehearsed: %s\n", last_error);
    return code;
}

/* --- dtypes -------------------------------------------------------------------------------------------------------- */

static size_t size_of(ncclDataType_t dtype)
{
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return sizes[dtype];
}

static const char *name_of(int dtype)
{
    static const char *const names[] = {"int8",    "uint8",   "int32",   "uint32",   "int64",       "uint64",
                                        "float16", "float32", "float64", "bfloat16", "float8_e4m3", "float8_e5m2"};
    return names[dtype];
}

static float from_bfloat16(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static uint16_t to_bfloat16(float value) /* To the nearest, ties to even. */
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#define REDUCE_LOOP(type, load, store)                                                             \
    for (size_t i = 0; i < count; i++) {                                                           \
        type a = load(((type##_storage *)into)[i]), b = load(((const type##_storage *)from)[i]);   \
        type found = op == ncclSum ? a + b : op == ncclProd ? a * b : op == ncclMax ? (a > b ? a : b) : (a < b ? a : b); \
        ((type##_storage *)into)[i] = store(found);                                                \
    }                                                                                              \
    break
#define SAME(value) (value)
typedef int8_t int8_t_storage; typedef uint8_t uint8_t_storage; typedef int32_t int32_t_storage;
typedef uint32_t uint32_t_storage; typedef int64_t int64_t_storage; typedef uint64_t uint64_t_storage;
typedef float float_storage; typedef double double_storage; typedef _Float16 half; typedef _Float16 half_storage;
typedef float bfloat; typedef uint16_t bfloat_storage;

/* into = into op from, each step rounded to the dtype, as the hops of a ring are. */
static void accumulate(void *into, const void *from, size_t count, ncclDataType_t dtype, int op)
{
    switch (dtype) {
    case ncclInt8: REDUCE_LOOP(int8_t, SAME, SAME);
    case ncclUint8: REDUCE_LOOP(uint8_t, SAME, SAME);
    case ncclInt32: REDUCE_LOOP(int32_t, SAME, SAME);
    case ncclUint32: REDUCE_LOOP(uint32_t, SAME, SAME);
    case ncclInt64: REDUCE_LOOP(int64_t, SAME, SAME);
    case ncclUint64: REDUCE_LOOP(uint64_t, SAME, SAME);
    case ncclFloat16: REDUCE_LOOP(half, SAME, SAME);
    case ncclFloat32: REDUCE_LOOP(float, SAME, SAME);
    case ncclFloat64: REDUCE_LOOP(double, SAME, SAME);
    case ncclBfloat16: REDUCE_LOOP(bfloat, from_bfloat16, to_bfloat16);
    default: break; /* check() refuses it. */
    }
}

#define SCALE_LOOP(type, load, store)                                                              \
    for (size_t i = 0; i < count; i++)                                                             \
        ((type##_storage *)into)[i] = store((type)(load(((type##_storage *)into)[i]) * factor));   \
    break

static void scale(void *into, size_t count, ncclDataType_t dtype, double factor)
{
    switch (dtype) {
    case ncclInt8: SCALE_LOOP(int8_t, SAME, SAME);
    case ncclUint8: SCALE_LOOP(uint8_t, SAME, SAME);
    case ncclInt32: SCALE_LOOP(int32_t, SAME, SAME);
    case ncclUint32: SCALE_LOOP(uint32_t, SAME, SAME);
    case ncclInt64: SCALE_LOOP(int64_t, SAME, SAME);
    case ncclUint64: SCALE_LOOP(uint64_t, SAME, SAME);
    case ncclFloat16: SCALE_LOOP(half, SAME, SAME);
    case ncclFloat32: SCALE_LOOP(float, SAME, SAME);
    case ncclFloat64: SCALE_LOOP(double, SAME, SAME);
    case ncclBfloat16: SCALE_LOOP(bfloat, from_bfloat16, to_bfloat16);
    default: break;
    }
}

/* --- communicators ------------------------------------------------------------------------------------------------- */

static const char *op_name(int op)
{
    static const char *const names[] = {"sum", "product", "max", "min", "average"};
    return op < 0 ? "" : op < 5 ? names[op] : "premultiplied sum";
}

static void describe(char *text, size_t room, int rank, const call *it)
{
    char root[32] = "";
    if (it->root >= 0)
        snprintf(root, sizeof root, ", root %d", it->root);
    snprintf(text, room, "  rank %d: %s of %llu %s %s%s at %s", rank, kind_names[it->kind], (unsigned long long)it->count,
             name_of(it->dtype), op_name(it->op), root, it->site);
}

/* The error of this rank is that of all: the report in last_error. */
static void break_communicator(ncclComm_t comm)
{
    snprintf(comm->shared->report, sizeof comm->shared->report, "%s", last_error);
    comm->shared->is_broken = 1;
    rehearsal_fail("%s", last_error);
}

/* Compare what other ranks have issued with this rank's collective ``number``. */
static bool matches(ncclComm_t comm, uint64_t number)
{
    shared *all = comm->shared;
    const call *own = &all->members[comm->rank].calls[number % RING];
    for (int rank = 0; rank < comm->size; rank++) {
        const call *other = &all->members[rank].calls[number % RING];
        if (rank == comm->rank || all->members[rank].issued < number || all->members[rank].issued >= number + RING)
            continue;
        if (own->kind == other->kind && own->dtype == other->dtype && own->op == other->op && own->root == other->root &&
            own->count == other->count)
            continue;
        char mine[700], theirs[700];
        describe(mine, sizeof mine, comm->rank, own);
        describe(theirs, sizeof theirs, rank, other);
        snprintf(last_error, sizeof last_error,
                 "collective %llu of communicator %s differs between ranks; NCCL hangs, or mixes bytes:\n%s\n%s",
                 (unsigned long long)number, comm->name, rank < comm->rank ? theirs : mine, rank < comm->rank ? mine : theirs);
        break_communicator(comm);
        return false;
    }
    return true;
}

/* Whether a rank has left without this rank's collective ``number``: destroyed the communicator, or aborted it. */
static bool is_left_alone(ncclComm_t comm, uint64_t number)
{
    for (int rank = 0; rank < comm->size; rank++) {
        const member *other = &comm->shared->members[rank];
        if (!other->has_left || other->ready >= number)
            continue;
        char mine[700];
        describe(mine, sizeof mine, comm->rank, &comm->shared->members[comm->rank].calls[number % RING]);
        snprintf(last_error, sizeof last_error,
                 "collective %llu of communicator %s was not issued by rank %d, which has left; NCCL hangs:\n%s",
                 (unsigned long long)number, comm->name, rank, mine);
        break_communicator(comm);
        return true;
    }
    return false;
}

/* Wait until a condition holds for all members. A rank that has died, or never comes, is waited for as NCCL waits. */
#define WAIT_FOR(condition)     \
    while (!(condition))        \
        usleep(100)

static int find_demanded(cudaStream_t *stream, uint64_t *number);

/* On the null device no other process is needed: what the others would send is not computed either. */
static ncclResult_t join_alone(ncclComm_t *made, const char *name, int size, int rank)
{
    ncclComm_t comm = calloc(1, sizeof *comm);
    comm->shared = calloc(1, sizeof *comm->shared);
    snprintf(comm->name, sizeof comm->name, "%.16s", name);
    comm->rank = rank, comm->size = size;
    cudaGetDevice(&comm->device);
    *made = comm;
    return ncclSuccess;
}

static ncclResult_t join_communicator(ncclComm_t *made, const char *name, int size, int rank)
{
    char path[128];
    if (rehearsal_is_null())
        return join_alone(made, name, size, rank);
    if (size > MAX_RANKS)
        return refuse(ncclInvalidArgument, "a rehearsal has at most %d ranks, got %d", MAX_RANKS, size);
    if (rank < 0 || rank >= size)
        return refuse(ncclInvalidArgument, "Invalid rank requested : %d/%d", rank, size);
    snprintf(path, sizeof path, "/dev/shm/rehearsal-%s", name);
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof(shared)) != 0)
        return refuse(ncclSystemError, "%s: %s", path, strerror(errno));
    ncclComm_t comm = calloc(1, sizeof *comm);
    comm->shared = mmap(NULL, sizeof(shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (comm->shared == MAP_FAILED)
        return refuse(ncclSystemError, "%s: %s", path, strerror(errno));
    snprintf(comm->name, sizeof comm->name, "%.16s%s", name, strlen(name) > 32 ? name + 32 : "");
    comm->rank = rank, comm->size = size;
    cudaGetDevice(&comm->device);
    member *own = &comm->shared->members[rank];
    own->file = rehearsal_memory_file();
    own->process = getpid();
    for (int other = 0; other < size; other++)
        WAIT_FOR(comm->shared->members[other].process != 0);
    if (++comm->shared->mapped == size)
        unlink(path); /* All have it. */
    pthread_mutex_lock(&mutex);
    comm->next = communicators, communicators = comm;
    pthread_mutex_unlock(&mutex);
    rehearsal_on_demand(find_demanded);
    *made = comm;
    return ncclSuccess;
}

ncclResult_t ncclGetVersion(int *version) { *version = NCCL_VERSION_CODE; return ncclSuccess; }

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    unsigned char bytes[16];
    memset(id, 0, sizeof *id);
    if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes)
        return ncclSystemError;
    for (int i = 0; i < 16; i++)
        snprintf(id->internal + 2 * i, 3, "%02x", bytes[i]);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int size, ncclUniqueId id, int rank)
{
    return join_communicator(comm, id.internal, size, rank);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank, ncclConfig_t *config)
{
    return join_communicator(comm, id.internal, size, rank);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int size, int rank, int ids, ncclUniqueId *id, ncclConfig_t *config)
{
    return join_communicator(comm, id->internal, size, rank);
}

ncclResult_t ncclCommInitAll(ncclComm_t *comms, int devices, const int *list)
{
    return refuse(ncclInvalidUsage, "ncclCommInitAll has no stand-in: each rank is a process");
}

ncclResult_t ncclCommShrink(ncclComm_t comm, int *excluded, int count, ncclComm_t *made, ncclConfig_t *config, int flags)
{
    return refuse(ncclInvalidUsage, "ncclCommShrink has no stand-in");
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *made, ncclConfig_t *config)
{
    int rank = 0, size = 0;
    char name[128];
    *made = NULL;
    if (rehearsal_is_null())
        return refuse(ncclInvalidUsage, "ncclCommSplit has no stand-in on the null device");
    member *own = &comm->shared->members[comm->rank];
    /* No rank writes its next color before all have read this one: the count is odd while a split is read. */
    for (int other = 0; other < comm->size; other++)
        WAIT_FOR(comm->shared->members[other].splits >= 2 * comm->splits);
    own->color = color, own->key = key;
    own->splits = 2 * comm->splits + 1;
    for (int other = 0; other < comm->size; other++) {
        WAIT_FOR(comm->shared->members[other].splits > 2 * comm->splits);
        const member *there = &comm->shared->members[other];
        if (there->color != color)
            continue;
        size++;
        rank += there->key < key || (there->key == key && other < comm->rank);
    }
    own->splits = 2 * comm->splits + 2;
    snprintf(name, sizeof name, "%s.%llu.%d", comm->name, (unsigned long long)++comm->splits, color);
    return color == NCCL_SPLIT_NOCOLOR ? ncclSuccess : join_communicator(made, name, size, rank);
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) { *count = comm->size; return ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) { *rank = comm->rank; return ncclSuccess; }
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device) { *device = comm->device; return ncclSuccess; }

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error)
{
    *error = comm->shared->is_broken ? ncclInvalidUsage : ncclSuccess;
    return ncclSuccess;
}

/* Run what this rank has issued. */
static void finish(ncclComm_t comm)
{
    for (uint64_t number = comm->issued > RING ? comm->issued - RING + 1 : 1; number <= comm->issued && !comm->is_aborted; number++)
        rehearsal_run_until(comm->stream_of[number % RING], comm->number_of[number % RING]);
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) { finish(comm); return ncclSuccess; }

/* A communicator is never freed: operations and records may name it. */
static void leave(ncclComm_t comm)
{
    comm->is_aborted = true;
    if (rehearsal_is_null())
        return;
    comm->shared->members[comm->rank].has_left = 1;
    pthread_mutex_lock(&mutex);
    for (ncclComm_t *each = &communicators; *each; each = &(*each)->next)
        if (*each == comm) {
            *each = comm->next;
            break;
        }
    pthread_mutex_unlock(&mutex);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) { finish(comm); leave(comm); return ncclSuccess; }
ncclResult_t ncclCommAbort(ncclComm_t comm) { leave(comm); return ncclSuccess; }

const char *ncclGetErrorString(ncclResult_t code)
{
    static const char *const texts[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error",
                                        "invalid argument", "invalid usage", "remote process exited or there was a network error",
                                        "NCCL operation in progress"};
    return code >= 0 && code < 8 ? texts[code] : "unknown result code";
}

const char *ncclGetLastError(ncclComm_t comm) { return last_error; }

/* --- running a collective ------------------------------------------------------------------------------------------ */

typedef struct {
    ncclComm_t comm;
    enum kind kind;
    uint64_t number;
    const char *input;
    char *output;
    size_t count; /* Of the call. */
    ncclDataType_t dtype;
    int op, root;
    double scale;
    char *result; /* Computed, until all ranks have read this one's input. */
    size_t result_nbytes;
    enum { WAITING, COPIED } state;
} collective;

static const char *input_of(const collective *it, int rank)
{
    const member *there = &it->comm->shared->members[rank];
    return rehearsal_peer_memory(there->process, there->file) + there->calls[it->number % RING].input;
}

static void reduce(const collective *it, char *into, size_t skip, size_t count)
{
    size_t nbytes = count * size_of(it->dtype), at = skip * size_of(it->dtype);
    char *term = it->op >= ncclNumOps ? malloc(nbytes) : NULL;
    int op = it->op == ncclAvg || it->op >= ncclNumOps ? ncclSum : it->op;
    for (int rank = 0; rank < it->comm->size; rank++) {
        const char *from = input_of(it, rank) + at;
        if (term) {
            memcpy(term, from, nbytes);
            scale(term, count, it->dtype, it->scale);
            from = term;
        }
        if (rank == 0)
            memcpy(into, from, nbytes);
        else
            accumulate(into, from, count, it->dtype, op);
    }
    if (it->op == ncclAvg)
        scale(into, count, it->dtype, 1.0 / it->comm->size);
    free(term);
}

static void compute(collective *it)
{
    int rank = it->comm->rank, size = it->comm->size;
    size_t itemsize = size_of(it->dtype), nbytes = it->count * itemsize;
    switch (it->kind) {
    case ALL_REDUCE:
        reduce(it, it->result, 0, it->count);
        break;
    case REDUCE:
        if (rank == it->root)
            reduce(it, it->result, 0, it->count);
        break;
    case REDUCE_SCATTER:
        reduce(it, it->result, (size_t)rank * it->count, it->count);
        break;
    case ALL_GATHER:
        for (int other = 0; other < size; other++)
            memcpy(it->result + (size_t)other * nbytes, input_of(it, other), nbytes);
        break;
    case BROADCAST:
        memcpy(it->result, input_of(it, it->root), nbytes);
        break;
    case ALL_TO_ALL:
        for (int other = 0; other < size; other++)
            memcpy(it->result + (size_t)other * nbytes, input_of(it, other) + (size_t)rank * nbytes, nbytes);
        break;
    default:
        break;
    }
}

static bool all_reach(const ncclComm_t comm, size_t field, uint64_t number)
{
    for (int rank = 0; rank < comm->size; rank++)
        if (*(_Atomic uint64_t *)((char *)&comm->shared->members[rank] + field) < number)
            return false;
    return true;
}

static int run_collective(void *argument)
{
    collective *it = argument;
    ncclComm_t comm = it->comm;
    member *own = &comm->shared->members[comm->rank];
    if (comm->is_aborted)
        return REHEARSAL_DONE;
    if (comm->shared->is_broken) {
        rehearsal_fail("%s", comm->shared->report);
        return REHEARSAL_FAILED;
    }
    if (it->state == WAITING) {
        if (!matches(comm, it->number))
            return REHEARSAL_FAILED;
        own->ready = it->number;
        if (!all_reach(comm, offsetof(member, ready), it->number))
            return is_left_alone(comm, it->number) ? REHEARSAL_FAILED : REHEARSAL_BLOCKED;
        it->result = it->result_nbytes ? malloc(it->result_nbytes) : NULL;
        compute(it);
        own->copied = it->number;
        it->state = COPIED;
    }
    if (!all_reach(comm, offsetof(member, copied), it->number))
        return REHEARSAL_BLOCKED;
    if (it->result_nbytes)
        memcpy(it->output, it->result, it->result_nbytes);
    own->finished = it->number;
    return REHEARSAL_DONE;
}

static void drop_collective(void *argument)
{
    collective *it = argument;
    free(it->result);
    free(it);
}

/* --- sends and receives -------------------------------------------------------------------------------------------- */

typedef struct message {
    struct message *next;
    enum kind kind;
    int peer;
    uint64_t number; /* Among the messages of this pair. */
    char *at;
    size_t count;
    ncclDataType_t dtype;
    const char *site;
    bool is_posted, is_done;
} message;

/* All sends and receives of a group on a stream: they advance together. */
typedef struct exchange {
    struct exchange *next;
    ncclComm_t comm;
    message *messages;
    cudaStream_t stream;
    uint64_t number;
} exchange;

static bool run_message(ncclComm_t comm, message *it)
{
    channel *pair = it->kind == SEND ? &comm->shared->channels[comm->rank][it->peer]
                                     : &comm->shared->channels[it->peer][comm->rank];
    if (it->kind == SEND) {
        if (!it->is_posted && pair->received == it->number - 1) { /* The one before is read. */
            pair->input = rehearsal_offset(it->at, it->count * size_of(it->dtype));
            pair->count = it->count, pair->dtype = it->dtype;
            snprintf(pair->site, SITE, "%s", it->site);
            pair->sent = it->number;
            it->is_posted = true;
        }
        return it->is_posted && pair->received >= it->number;
    }
    if (pair->sent < it->number)
        return false;
    if (pair->count != it->count || pair->dtype != (int)it->dtype) {
        snprintf(last_error, sizeof last_error,
                 "message %llu from rank %d to rank %d differs; NCCL hangs, or mixes bytes:\n"
                 "  rank %d: ncclSend of %llu %s at %s\n  rank %d: ncclRecv of %llu %s at %s",
                 (unsigned long long)it->number, it->peer, comm->rank, it->peer, (unsigned long long)pair->count,
                 name_of(pair->dtype), pair->site, comm->rank, (unsigned long long)it->count, name_of(it->dtype), it->site);
        break_communicator(comm);
        return true;
    }
    const member *there = &comm->shared->members[it->peer];
    memcpy(it->at, rehearsal_peer_memory(there->process, there->file) + pair->input, it->count * size_of(it->dtype));
    pair->received = it->number;
    return true;
}

static int run_exchange(void *argument)
{
    exchange *it = argument;
    bool is_done = true;
    if (it->comm->is_aborted)
        return REHEARSAL_DONE;
    if (it->comm->shared->is_broken) {
        rehearsal_fail("%s", it->comm->shared->report);
        return REHEARSAL_FAILED;
    }
    for (message *each = it->messages; each; each = each->next) {
        each->is_done = each->is_done || run_message(it->comm, each);
        is_done = is_done && each->is_done;
    }
    return is_done ? REHEARSAL_DONE : REHEARSAL_BLOCKED;
}

static void drop_exchange(void *argument)
{
    exchange *it = argument;
    pthread_mutex_lock(&mutex);
    for (exchange **each = &it->comm->exchanges; *each; each = &(*each)->next)
        if (*each == it) {
            *each = it->next;
            break;
        }
    pthread_mutex_unlock(&mutex);
    while (it->messages) {
        message *next = it->messages->next;
        free(it->messages);
        it->messages = next;
    }
    free(it);
}

/* An operation of this rank that another one is ready for, and waits. */
static int find_demanded(cudaStream_t *stream, uint64_t *number)
{
    int found = 0;
    pthread_mutex_lock(&mutex);
    for (ncclComm_t comm = communicators; comm && !found; comm = comm->next) {
        const member *own = &comm->shared->members[comm->rank];
        uint64_t next = own->finished + 1;
        for (int rank = 0; rank < comm->size && next <= comm->issued && !found; rank++)
            if (rank != comm->rank && comm->shared->members[rank].ready >= next) {
                *stream = comm->stream_of[next % RING], *number = comm->number_of[next % RING];
                found = 1;
            }
        for (exchange *each = comm->exchanges; each && !found; each = each->next)
            for (message *one = each->messages; one && !found; one = one->next) {
                const channel *to = &comm->shared->channels[comm->rank][one->peer];
                const channel *from = &comm->shared->channels[one->peer][comm->rank];
                if (!one->is_done && each->number &&
                    (one->kind == SEND ? to->sent < one->number || to->received >= one->number : from->sent >= one->number)) {
                    *stream = each->stream, *number = each->number;
                    found = 1;
                }
            }
    }
    pthread_mutex_unlock(&mutex);
    return found;
}

/* --- issuing ------------------------------------------------------------------------------------------------------- */

static __thread int group_depth;
static __thread exchange *grouped;

/* NCCL's checks of arguments, and those that a GPU makes when it reads the memory. */
static ncclResult_t check(ncclComm_t comm, enum kind kind, const void *at, size_t count, ncclDataType_t dtype, int peer)
{
    if (!comm)
        return refuse(ncclInvalidArgument, "%s : comm argument is NULL", kind_names[kind]);
    if (comm->is_aborted)
        return refuse(ncclInvalidUsage, "%s on a communicator that was aborted or destroyed", kind_names[kind]);
    if ((int)dtype < 0 || dtype >= ncclNumTypes)
        return refuse(ncclInvalidArgument, "%s : invalid type %d", kind_names[kind], dtype);
    if (peer >= comm->size)
        return refuse(ncclInvalidArgument, "%s : invalid root or peer %d (it should be in the 0..%d range)", kind_names[kind], peer,
                      comm->size - 1);
    if (count == 0)
        return ncclSuccess;
    if (!at)
        return refuse(ncclInvalidArgument, "%s : a buffer is NULL", kind_names[kind]);
    if ((uintptr_t)at % size_of(dtype))
        return refuse(ncclInvalidArgument, "%s : buffer %p is not aligned to %s at %s", kind_names[kind], at, name_of(dtype),
                      rehearsal_where());
    if (rehearsal_offset(at, count * size_of(dtype)) < 0)
        return refuse(ncclInvalidArgument, "%s : %zu %s at %p are not inside one allocation of device memory, at %s",
                      kind_names[kind], count, name_of(dtype), at, rehearsal_where());
    return ncclSuccess;
}

/* An operation on another stream than the last one waits for that: so does NCCL (comm->lastStream in its ncclLaunchPrepare). */
static void begin_launch(ncclComm_t comm, cudaStream_t stream)
{
    if (comm->last_mark && comm->last_stream != stream)
        rehearsal_order_behind(stream, comm->last_mark);
}

static void end_launch(ncclComm_t comm, cudaStream_t stream)
{
    if (comm->last_mark)
        rehearsal_drop_mark(comm->last_mark);
    comm->last_mark = rehearsal_mark(stream);
    comm->last_stream = stream;
}

static int run_nothing(void *argument) { return REHEARSAL_DONE; }

static ncclResult_t issue(enum kind kind, const void *input, size_t inputs, void *output, size_t outputs, size_t count,
                          ncclDataType_t dtype, int op, int root, ncclComm_t comm, cudaStream_t stream)
{
    ncclResult_t found = check(comm, kind, input, inputs, dtype, root);
    if (found == ncclSuccess)
        found = check(comm, kind, output, outputs, dtype, root);
    if (found != ncclSuccess)
        return found;
    bool reduces = kind == ALL_REDUCE || kind == REDUCE || kind == REDUCE_SCATTER;
    if (reduces && dtype >= ncclFloat8e4m3)
        return refuse(ncclInvalidUsage, "%s of %s has no stand-in", kind_names[kind], name_of(dtype));
    rehearsal_access accesses[2] = {{input, inputs * size_of(dtype), 0}, {output, outputs * size_of(dtype), 1}};
    if (rehearsal_is_null()) {
        begin_launch(comm, stream = rehearsal_stream(stream));
        rehearsal_launch(stream, kind_names[kind], run_nothing, NULL, NULL, accesses, 2, comm->size);
        end_launch(comm, stream);
        return ncclSuccess;
    }
    uint64_t number = ++comm->issued;
    member *own = &comm->shared->members[comm->rank];
    if (number > RING / 2) /* The ring has room for what other ranks have not finished. */
        rehearsal_run_until(comm->stream_of[(number - RING / 2) % RING], comm->number_of[(number - RING / 2) % RING]);
    call *claim = &own->calls[number % RING];
    *claim = (call){kind, dtype, reduces ? op : -1, root, count, inputs ? rehearsal_offset(input, 1) : 0, ""};
    snprintf(claim->site, SITE, "%s", rehearsal_where());
    own->issued = number;
    if (!matches(comm, number))
        return ncclInvalidUsage;
    collective *it = calloc(1, sizeof *it);
    *it = (collective){.comm = comm, .kind = kind, .number = number, .input = input, .output = output, .count = count,
                       .dtype = dtype, .op = op, .root = root, .result_nbytes = outputs * size_of(dtype)};
    if (op >= ncclNumOps)
        it->scale = comm->scalars[op - ncclNumOps];
    comm->stream_of[number % RING] = stream = rehearsal_stream(stream);
    comm->number_of[number % RING] = UINT64_MAX; /* Until it is known; find_demanded() runs in between only in other threads. */
    begin_launch(comm, stream);
    comm->number_of[number % RING] =
        rehearsal_launch(stream, kind_names[kind], run_collective, drop_collective, it, accesses, 2, comm->size);
    end_launch(comm, stream);
    return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void *input, void *output, size_t count, ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream)
{
    return issue(ALL_REDUCE, input, count, output, count, count, dtype, op, -1, comm, stream);
}

ncclResult_t ncclReduce(const void *input, void *output, size_t count, ncclDataType_t dtype, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream)
{
    return issue(REDUCE, input, count, output, comm && comm->rank == root ? count : 0, count, dtype, op, root, comm, stream);
}

ncclResult_t ncclBroadcast(const void *input, void *output, size_t count, ncclDataType_t dtype, int root, ncclComm_t comm,
                           cudaStream_t stream)
{
    return issue(BROADCAST, input, comm && comm->rank == root ? count : 0, output, count, count, dtype, -1, root, comm, stream);
}

ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t dtype, int root, ncclComm_t comm, cudaStream_t stream)
{
    return ncclBroadcast(buffer, buffer, count, dtype, root, comm, stream);
}

ncclResult_t ncclReduceScatter(const void *input, void *output, size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream)
{
    return issue(REDUCE_SCATTER, input, comm ? count * comm->size : 0, output, count, count, dtype, op, -1, comm, stream);
}

ncclResult_t ncclAllGather(const void *input, void *output, size_t count, ncclDataType_t dtype, ncclComm_t comm,
                           cudaStream_t stream)
{
    return issue(ALL_GATHER, input, count, output, comm ? count * comm->size : 0, count, dtype, -1, -1, comm, stream);
}

ncclResult_t ncclAlltoAll(const void *input, void *output, size_t count, ncclDataType_t dtype, ncclComm_t comm,
                          cudaStream_t stream)
{
    size_t all = comm ? count * comm->size : 0;
    return issue(ALL_TO_ALL, input, all, output, all, count, dtype, -1, -1, comm, stream);
}

static ncclResult_t add_message(enum kind kind, void *at, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm,
                                cudaStream_t stream)
{
    ncclResult_t found = check(comm, kind, at, count, dtype, peer);
    if (found != ncclSuccess)
        return found;
    if (rehearsal_is_null())
        return refuse(ncclInvalidUsage, "%s has no stand-in on the null device", kind_names[kind]);
    stream = rehearsal_stream(stream);
    ncclGroupStart();
    exchange *group = grouped;
    while (group && (group->comm != comm || group->stream != stream))
        group = group->next;
    if (!group) {
        group = calloc(1, sizeof *group);
        *group = (exchange){grouped, comm, NULL, stream, 0};
        grouped = group;
    }
    message *it = calloc(1, sizeof *it), **last = &group->messages;
    *it = (message){.kind = kind, .peer = peer, .at = at, .count = count, .dtype = dtype, .site = rehearsal_where()};
    it->number = kind == SEND ? ++comm->sent[peer] : ++comm->received[peer];
    while (*last)
        last = &(*last)->next;
    *last = it;
    return ncclGroupEnd();
}

ncclResult_t ncclSend(const void *at, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm, cudaStream_t stream)
{
    return add_message(SEND, (void *)at, count, dtype, peer, comm, stream);
}

ncclResult_t ncclRecv(void *at, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm, cudaStream_t stream)
{
    return add_message(RECEIVE, at, count, dtype, peer, comm, stream);
}

ncclResult_t ncclGroupStart(void) { group_depth++; return ncclSuccess; }

/* Collectives of a group are issued at once, one after the other: on one stream, their order is that of the calls. */
ncclResult_t ncclGroupEnd(void)
{
    if (group_depth == 0)
        return refuse(ncclInvalidUsage, "ncclGroupEnd: not in a group call.");
    if (--group_depth > 0)
        return ncclSuccess;
    while (grouped) {
        exchange *it = grouped;
        size_t count = 0;
        grouped = it->next;
        for (message *each = it->messages; each; each = each->next)
            count++;
        rehearsal_access *accesses = calloc(count, sizeof *accesses);
        count = 0;
        for (message *each = it->messages; each; each = each->next)
            accesses[count++] = (rehearsal_access){each->at, each->count * size_of(each->dtype), each->kind == RECEIVE};
        pthread_mutex_lock(&mutex);
        it->next = it->comm->exchanges, it->comm->exchanges = it;
        pthread_mutex_unlock(&mutex);
        uint64_t *number = &it->number;
        ncclComm_t comm = it->comm;
        cudaStream_t stream = it->stream;
        begin_launch(comm, stream);
        uint64_t found = rehearsal_launch(it->stream, "ncclSend/ncclRecv", run_exchange, drop_exchange, it, accesses, count, 1);
        pthread_mutex_lock(&mutex);
        for (exchange *each = comm->exchanges; each; each = each->next)
            if (&each->number == number) /* It has not run yet. */
                each->number = found;
        pthread_mutex_unlock(&mutex);
        free(accesses);
        end_launch(comm, stream);
    }
    return ncclSuccess;
}

ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t *info)
{
    return refuse(ncclInvalidUsage, "ncclGroupSimulateEnd has no stand-in: a rehearsal knows no time");
}

/* --- what a communicator owns -------------------------------------------------------------------------------------- */

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t dtype, ncclScalarResidence_t residence,
                                      ncclComm_t comm)
{
    if (residence == ncclScalarDevice)
        cudaDeviceSynchronize(); /* Here the number is read at once. */
    for (int slot = 0; slot < 64; slot++)
        if (!comm->has_scalar[slot]) {
            comm->has_scalar[slot] = true;
            comm->scalars[slot] = dtype == ncclFloat32   ? *(float *)scalar
                                  : dtype == ncclFloat64 ? *(double *)scalar
                                  : dtype == ncclFloat16 ? (double)*(_Float16 *)scalar
                                                         : from_bfloat16(*(uint16_t *)scalar);
            *op = (ncclRedOp_t)(ncclNumOps + slot);
            return ncclSuccess;
        }
    return refuse(ncclInvalidUsage, "more than 64 ops of one communicator");
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) { comm->has_scalar[op - ncclNumOps] = false; return ncclSuccess; }

ncclResult_t ncclMemAlloc(void **at, size_t nbytes) { return cudaMalloc(at, nbytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError; }
ncclResult_t ncclMemFree(void *at) { return cudaFree(at) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError; }

ncclResult_t ncclCommRegister(const ncclComm_t comm, void *at, size_t nbytes, void **handle)
{
    if (rehearsal_offset(at, nbytes) < 0)
        return refuse(ncclInvalidArgument, "ncclCommRegister : %zu bytes at %p are not inside one allocation", nbytes, at);
    *handle = at;
    return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle) { return ncclSuccess; }

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *at, size_t nbytes, ncclWindow_t *window, int flags)
{
    return ncclCommRegister(comm, at, nbytes, (void **)window);
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) { return ncclSuccess; }

ncclResult_t ncclDevCommCreate(ncclComm_t comm, void *requirements, void *made)
{
    return refuse(ncclInvalidUsage, "ncclDevCommCreate has no stand-in: kernels do not run");
}

ncclResult_t ncclDevCommDestroy(ncclComm_t comm, void *made)
{
    return refuse(ncclInvalidUsage, "ncclDevCommDestroy has no stand-in: kernels do not run");
}
