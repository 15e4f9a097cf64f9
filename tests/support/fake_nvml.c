/* GPUs behind the entry points of NVIDIA's management library that the tests need: two GeForce cards, or FAKE_NVML_COUNT
   (up to 8) of the model FAKE_NVML_NAME. FAKE_NVML_DRIVER is the driver's version. "MIG-slice" is a part of the second. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct memory { unsigned long long total, free, used; };
struct utilization { unsigned gpu, memory; };
struct process { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; };
struct pci { char legacy[16]; unsigned domain, bus, device, pci_device, pci_subsystem; char id[32]; };

static int handles[9] = {0, 1, 2, 3, 4, 5, 6, 7, 8};
static int *const slice = &handles[8];
static unsigned number(void) { const char *count = getenv("FAKE_NVML_COUNT"); return count ? (unsigned)atoi(count) : 2; }
static const char *model(void) { return getenv("FAKE_NVML_NAME"); }
static int is_model(const char *part) { return model() && strstr(model(), part); }
static unsigned long long gigabytes(void) { return is_model("H100") ? 80 : is_model("T4") ? 15 : 24; }

int nvmlInitWithFlags(unsigned flags) { return flags ? 2 : 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = number(); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, int **device) { *device = &handles[index]; return index >= number() ? 2 : 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, int **device) { *device = slice; return strcmp(uuid, "MIG-slice") ? 6 : 0; }
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(int *part, int **device) { *device = &handles[1]; return part == slice ? 0 : 2; }
int nvmlDeviceGetIndex(int *device, unsigned *index) { *index = *device; return 0; }
int nvmlDeviceGetName(int *device, char *name, unsigned length) {
    if (model()) snprintf(name, length, "%s", model());
    else snprintf(name, length, "NVIDIA GeForce RTX 40%d0", 8 + *device);
    return 0;
}
int nvmlDeviceGetUUID(int *device, char *uuid, unsigned length) {
    if (device == slice) snprintf(uuid, length, "MIG-slice");
    else snprintf(uuid, length, "GPU-%dabc", *device);
    return 0;
}
/* With FAKE_NVML_MIG, the second GPU is divided. */
int nvmlDeviceGetMigMode(int *device, unsigned *current, unsigned *pending) {
    *current = *pending = getenv("FAKE_NVML_MIG") && *device == 1;
    return 0;
}
int nvmlDeviceGetMigDeviceHandleByIndex(int *device, unsigned index, int **part) {
    *part = slice;
    return *device == 1 && index == 0 ? 0 : 6;
}
/* The second GeForce card shares the CPU memory: NVML_ERROR_NOT_SUPPORTED. The slice has 10 GiB. */
int nvmlDeviceGetMemoryInfo(int *device, struct memory *memory) {
    memory->total = (device == slice ? 10 : gigabytes()) << 30;
    memory->used = (3ull + *device) << 30;
    return *device == 1 && !model() ? 3 : 0;
}
int nvmlDeviceGetPciInfo_v3(int *device, struct pci *pci) {
    memset(pci, 0, sizeof *pci);
    snprintf(pci->id, sizeof pci->id, "00000000:%d1:00.0", *device + 4);
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(int *device, int *major, int *minor) {
    (void)device;
    *major = is_model("H100") ? 9 : is_model("T4") ? 7 : 8;
    *minor = is_model("H100") ? 0 : is_model("T4") ? 5 : 9;
    return 0;
}
int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    const char *asked = getenv("FAKE_NVML_DRIVER");
    snprintf(version, length, "%s", asked ? asked : "535.104.05");
    return 0;
}
int nvmlDeviceGetUtilizationRates(int *device, struct utilization *rates) { rates->gpu = 40 + *device; rates->memory = 0; return 0; }
/* One process on each GPU, by the pid that the host of the containers knows; NVML_ERROR_INSUFFICIENT_SIZE without a
   buffer. */
int nvmlDeviceGetComputeRunningProcesses_v3(int *device, unsigned *count, struct process *processes) {
    *count = 1;
    if (processes == NULL) return 7;
    memset(processes, 0, sizeof *processes);
    processes->pid = 100 + *device;
    processes->bytes = 1ull << 30;
    return 0;
}
