/* A stub of what torch calls in CUDA's driver before it creates a context, with FAKE_CUDA_COUNT devices (default: 1).
   Each cuInit writes a line "PID" to the file FAKE_CUDA_LOG, which shows the processes that initialized the driver. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, NOT_INITIALIZED = 3, NO_SUCH_ENTRY = 500, NOT_SUPPORTED = 801 };

static int initialised;

int cuInit(unsigned flags) {
    FILE *log = getenv("FAKE_CUDA_LOG") ? fopen(getenv("FAKE_CUDA_LOG"), "a") : NULL;
    (void)flags;
    if (log) {
        fprintf(log, "%d\n", (int)getpid());
        fclose(log);
    }
    initialised = 1;
    return SUCCESS;
}

int cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }

int cuDeviceGetCount(int *count) {
    const char *asked = getenv("FAKE_CUDA_COUNT");
    *count = asked ? atoi(asked) : 1;
    return initialised ? SUCCESS : NOT_INITIALIZED;
}

int cuGetExportTable(const void **table, const void *id) { (void)table; (void)id; return NO_SUCH_ENTRY; }

/* Devices whose index is at least FAKE_CUDA_CONTEXTS (default: 0) have no context, and none may be created. One stream
   has work: FAKE_CUDA_BUSY is 10 * device index + stream. Stream 7 is being captured: a query would end the capture. */
static int entered = -1;
static int asked(const char *name) { return getenv(name) ? atoi(getenv(name)) : 0; }
int cuThreadExchangeStreamCaptureMode(int *mode) { return *mode == 2 ? SUCCESS : 1; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return SUCCESS; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = device < asked("FAKE_CUDA_CONTEXTS");
    return SUCCESS;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    if (device >= asked("FAKE_CUDA_CONTEXTS")) abort();
    *context = (void *)(long)(device + 1);
    return SUCCESS;
}
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return SUCCESS; }
int cuCtxSetCurrent(void *context) { entered = (int)(long)context - 1; return SUCCESS; }
int cuStreamIsCapturing(void *stream, int *status) { *status = (long)stream == 7; return SUCCESS; }
int cuStreamQuery(void *stream) {
    if ((long)stream == 7 || entered < 0) abort();
    return getenv("FAKE_CUDA_BUSY") && asked("FAKE_CUDA_BUSY") == 10 * entered + (int)(long)stream ? 600 : SUCCESS;
}

static int other(void) { return initialised ? NOT_SUPPORTED : NOT_INITIALIZED; }

int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long flags, int *status);

int cuGetProcAddress(const char *name, void **function, int version, unsigned long flags) {
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}

int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long flags, int *status) {
    static const struct { const char *name; void *function; } known[] = {
        {"cuInit", (void *)cuInit},
        {"cuDriverGetVersion", (void *)cuDriverGetVersion},
        {"cuDeviceGetCount", (void *)cuDeviceGetCount},
        {"cuGetProcAddress", (void *)cuGetProcAddress_v2},
        {"cuGetExportTable", (void *)cuGetExportTable},
    };
    (void)version; (void)flags;
    if (status) *status = 0;
    *function = (void *)other;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(name, known[i].name)) *function = known[i].function;
    return SUCCESS;
}
