/* What the stand-ins share: streams and their operations, device memory, and where a call comes from.
 *
 * libcudart.so.13 has the streams and the memory. libnccl.so.2 and the operators of torch launch work on these streams.
 */
#ifndef REHEARSAL_DEVICE_H
#define REHEARSAL_DEVICE_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What an operation's function returns. */
enum {
    REHEARSAL_DONE = 0,
    REHEARSAL_BLOCKED = 1, /* Another rank is not there yet: call again. */
    REHEARSAL_FAILED = 2   /* It has called rehearsal_fail(). */
};

/* Memory that an operation reads or writes. */
typedef struct {
    const void *at;
    size_t nbytes;
    int is_write;
} rehearsal_access;

typedef int (*rehearsal_run)(void *argument);
typedef void (*rehearsal_drop)(void *argument);

/* Put an operation behind the work that the stream holds now. ``run`` is called when the stream reaches it; ``drop`` when the
 * operation is complete. ``ranks``: of a collective, whose ``run`` may return REHEARSAL_BLOCKED; else 0. Returns the operation's
 * number in the stream. */
uint64_t rehearsal_launch(cudaStream_t stream, const char *name, rehearsal_run run, rehearsal_drop drop, void *argument,
                          const rehearsal_access *accesses, size_t count, int ranks);

/* The stream itself, for a handle that may be the default stream of the current device. */
cudaStream_t rehearsal_stream(cudaStream_t handle);

/* Run the stream's operations up to ``number``, and what they wait for. */
cudaError_t rehearsal_run_until(cudaStream_t stream, uint64_t number);

/* A moment of a stream, which another stream waits for: events that no counter counts. */
void *rehearsal_mark(cudaStream_t stream);
void rehearsal_order_behind(cudaStream_t stream, void *mark);
void rehearsal_drop_mark(void *mark);

/* All later calls that wait fail, and give this text as the error's. */
void rehearsal_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* The file descriptor of this process's device memory, and the offset of an address in it; -1 if it is not device memory, or if
 * the allocation ends before ``nbytes``. */
int rehearsal_memory_file(void);
int64_t rehearsal_offset(const void *at, size_t nbytes);

/* The device memory of another process, or NULL. */
char *rehearsal_peer_memory(int process, int file);

/* An operation of this process that another rank waits for. A library that talks to other ranks sets ``find``: it fills in the
 * stream and the operation's number, and returns 0 if there is none. */
typedef int (*rehearsal_demand)(cudaStream_t *stream, uint64_t *number);
void rehearsal_on_demand(rehearsal_demand find);

/* Where the program is: a text that lives as long as the process. ``set`` gives the function that finds it. */
typedef const char *(*rehearsal_site)(void);
void rehearsal_set_site(rehearsal_site find);
const char *rehearsal_where(void);

/* What torch's caching allocator does with device memory, for the sanitizer's reports; and the number of its reports. */
void rehearsal_note_allocation(void *at, size_t nbytes, const char *site);
void rehearsal_note_free(void *at, const char *site);
uint64_t rehearsal_reports(void);

/* Whether operations run at all. */
bool rehearsal_is_null(void);

/* What is issued: kernels, copies and collectives; events and waits for them. Streams are numbered in the order of their creation. */
enum { REHEARSAL_LAUNCHED, REHEARSAL_RECORDED, REHEARSAL_WAITED, REHEARSAL_HOST_WAITED };
typedef struct {
    int kind, stream, ranks, on; /* A wait of ``stream`` is for operation ``number`` of stream ``on``. */
    const char *name;
    uint64_t number, host_ns;    /* Of the operation in its stream. The host's time without that of the stand-ins. */
    double read, written, work;  /* Bytes, and floating-point operations of matmuls. */
} rehearsal_entry;
void rehearsal_trace(int on);
bool rehearsal_is_traced(void);
size_t rehearsal_traced(const rehearsal_entry **entries);
void rehearsal_set_work(double operations); /* Of the next launch of this thread. */

/* The CPU time that a stand-in takes in place of a launch: calls may nest. */
void rehearsal_enter(void);
void rehearsal_leave(void);
uint64_t rehearsal_stand_in_ns(void);

/* Counts since the last reset, in the order of rehearsal_counter_names. */
enum {
    REHEARSAL_LAUNCHES,
    REHEARSAL_COPIES,
    REHEARSAL_RECORDS,
    REHEARSAL_WAITS,
    REHEARSAL_SYNCHRONIZATIONS,
    REHEARSAL_MALLOCS,
    REHEARSAL_FREES,
    REHEARSAL_COLLECTIVES,
    REHEARSAL_COUNTERS
};
void rehearsal_count(int counter);
void rehearsal_counts(uint64_t *counts, int reset);

#ifdef __cplusplus
}
#endif
#endif
