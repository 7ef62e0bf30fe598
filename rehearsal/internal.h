/* What the files of libcudart.so.13 share. */
#ifndef REHEARSAL_INTERNAL_H
#define REHEARSAL_INTERNAL_H

#include "device.h"

#include <pthread.h>
#include <stdbool.h>

/* A moment in a stream, which an event names. An event that is recorded again gets a new marker. */
typedef struct marker {
    int references;
    bool is_done;
    uint64_t tick;         /* The number of operations that the device had run when it was reached. */
    cudaStream_t stream;
    uint64_t number;
    struct clock *clock;   /* The sanitizer's. */
} marker;

typedef struct operation {
    struct operation *next;
    uint64_t number;
    const char *name, *site;
    rehearsal_run run;
    rehearsal_drop drop;
    void *argument;
    marker *waits_for;     /* It is complete when this is. */
    marker *reaches;       /* This is done when it is complete. */
    bool waits_for_peers;
} operation;

struct CUstream_st {
    struct CUstream_st *next;
    int index, device, priority;
    unsigned flags;
    bool is_destroyed;
    operation *head, *tail;
    uint64_t issued, done; /* Numbers of operations. */
    struct clock *clock;
};

struct CUevent_st {
    marker *marker;
    unsigned flags;
    unsigned queries;
};

/* streams.c */
void lock(void);
void unlock(void);
cudaStream_t stream_of(cudaStream_t handle);
cudaStream_t new_stream(int device, unsigned flags, int priority);
void destroy_stream(cudaStream_t stream);
uint64_t enqueue(cudaStream_t stream, operation *new_operation);
marker *record(cudaStream_t stream);
void wait_marker(cudaStream_t stream, marker *moment);
void drop_marker(marker *moment);
cudaError_t run_until(cudaStream_t stream, uint64_t number);
cudaError_t run_all(void);
bool poll_until(cudaStream_t stream, uint64_t number, unsigned *queries);
const char *failure(void);
void fail_locked(const char *text);
cudaStream_t all_streams(void);

/* memory.c */
cudaError_t device_malloc(void **at, size_t nbytes, int device);
cudaError_t device_free(void *at);
cudaError_t host_register(void *at, size_t nbytes, bool is_owned);
cudaError_t host_unregister(void *at);
bool host_is_pinned(const void *at);
int device_of(const void *at);
size_t device_used(int device);
size_t device_total(void);
void *allocation_base(const void *at, size_t *nbytes);
void *device_reserve(size_t nbytes, int device); /* Addresses alone. */
bool device_unreserve(void *at);
bool device_use(size_t nbytes, int device); /* False if the device has not so much. */
void device_unuse(size_t nbytes, int device);
void device_fresh(void *at, size_t nbytes);
void device_drop_pages(void *at, size_t nbytes);

/* driver.c */
void *driver_function(const char *name);

/* trace.c. All are called with the lock held. */
void trace_launch(cudaStream_t stream, const char *name, uint64_t number, const rehearsal_access *accesses, size_t count, int ranks);
void trace_record(const marker *moment);
void trace_wait(cudaStream_t stream, const marker *moment);
void trace_host_wait(cudaStream_t stream, uint64_t number);

/* sanitizer.c. All are called with the lock held. */
void check_launch(cudaStream_t stream, const operation *launched, const rehearsal_access *accesses, size_t count);
void check_record(cudaStream_t stream, marker *moment);
void check_wait(cudaStream_t stream, const marker *moment);
void check_host_waits(cudaStream_t stream, const marker *moment);
void check_forget(void *at, size_t nbytes);
void check_free_clock(struct clock *clock);

extern __thread int current_device;
int device_count(void);

#endif
