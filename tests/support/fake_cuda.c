/* CUDA's driver as far as torch asks for it before it creates a context: FAKE_CUDA_COUNT devices (default 1).
   Each cuInit is a line "PID" in the file FAKE_CUDA_LOG: it shows which process has initialised the driver. */
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
