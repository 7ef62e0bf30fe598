/* Functions of the driver that torch looks up by name: virtual memory, which expandable segments use.
 *
 * An address range is a part of the device's memory like an allocation. Only what is created for it counts as used.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <cuda.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    size_t nbytes;
    int device;
} chunk;

static CUresult device_get(CUdevice *device, int ordinal)
{
    *device = ordinal;
    return CUDA_SUCCESS;
}

/* Of handles for other processes and of multicast: this device has neither. */
static CUresult device_get_attribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    *value = 0;
    return CUDA_SUCCESS;
}

static CUresult get_granularity(size_t *nbytes, const CUmemAllocationProp *properties, CUmemAllocationGranularity_flags option)
{
    *nbytes = (size_t)2 << 20;
    return CUDA_SUCCESS;
}

static CUresult address_reserve(CUdeviceptr *at, size_t nbytes, size_t alignment, CUdeviceptr wanted, unsigned long long flags)
{
    lock();
    void *found = device_reserve(nbytes, current_device);
    unlock();
    *at = (CUdeviceptr)(uintptr_t)found;
    return found ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult address_free(CUdeviceptr at, size_t nbytes)
{
    lock();
    bool is_freed = device_unreserve((void *)(uintptr_t)at);
    unlock();
    return is_freed ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult create(CUmemGenericAllocationHandle *handle, size_t nbytes, const CUmemAllocationProp *properties,
                       unsigned long long flags)
{
    lock();
    rehearsal_count(REHEARSAL_MALLOCS);
    bool fits = device_use(nbytes, properties->location.id);
    unlock();
    if (!fits)
        return CUDA_ERROR_OUT_OF_MEMORY;
    chunk *made = malloc(sizeof *made);
    *made = (chunk){nbytes, properties->location.id};
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)made;
    return CUDA_SUCCESS;
}

static CUresult release(CUmemGenericAllocationHandle handle)
{
    chunk *released = (chunk *)(uintptr_t)handle;
    lock();
    rehearsal_count(REHEARSAL_FREES);
    device_unuse(released->nbytes, released->device);
    unlock();
    free(released);
    return CUDA_SUCCESS;
}

static CUresult map(CUdeviceptr at, size_t nbytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    lock();
    device_fresh((void *)(uintptr_t)at, nbytes);
    unlock();
    return CUDA_SUCCESS;
}

static CUresult unmap(CUdeviceptr at, size_t nbytes)
{
    lock();
    check_forget((void *)(uintptr_t)at, nbytes);
    device_drop_pages((void *)(uintptr_t)at, nbytes);
    unlock();
    return CUDA_SUCCESS;
}

static CUresult set_access(CUdeviceptr at, size_t nbytes, const CUmemAccessDesc *list, size_t count) { return CUDA_SUCCESS; }

static CUresult get_error_string(CUresult error, const char **text)
{
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "rehearsed: an error of the driver";
    return CUDA_SUCCESS;
}

static CUresult not_supported(void) { return CUDA_ERROR_NOT_SUPPORTED; }

/* Torch takes all of these or none. */
void *driver_function(const char *name)
{
    static const struct {
        const char *name;
        void *function;
    } functions[] = {
        {"cuDeviceGet", device_get},
        {"cuDeviceGetAttribute", device_get_attribute},
        {"cuMemAddressReserve", address_reserve},
        {"cuMemAddressFree", address_free},
        {"cuMemCreate", create},
        {"cuMemRelease", release},
        {"cuMemMap", map},
        {"cuMemUnmap", unmap},
        {"cuMemSetAccess", set_access},
        {"cuMemGetAllocationGranularity", get_granularity},
        {"cuGetErrorString", get_error_string},
        {"cuMemExportToShareableHandle", not_supported},
        {"cuMemImportFromShareableHandle", not_supported},
        {"cuMemRetainAllocationHandle", not_supported},
        {"cuMemGetAllocationPropertiesFromHandle", not_supported},
        {"cuMemsetD32Async", not_supported},
        {"cuStreamWriteValue32", not_supported},
    };
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (strcmp(functions[i].name, name) == 0)
            return functions[i].function;
    return NULL;
}
