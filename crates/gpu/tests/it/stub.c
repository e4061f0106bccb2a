/* Stand-ins for the vendors' libraries, as small as finding them needs. Built by the tests:
 *   -DDRIVER, -DRUNTIME, -DMUSA, -DHIP   which interface
 *   -DLACKS_EVENT_QUERY                  without one function that is always there
 *   -DSLOW                               opening it takes five seconds
 * At run time, from the environment: STUB_INIT (code of the first call), STUB_DEVICES, STUB_DRIVER,
 * STUB_VERSION, STUB_DELAY (seconds that the driver's first call takes). Every call that initialises is
 * counted. */
#include <stdlib.h>
#include <unistd.h>

#ifdef SLOW
__attribute__((constructor)) static void opening(void) { sleep(5); }
#endif

static int number(const char *name, int otherwise) {
  const char *text = getenv(name);
  return text ? atoi(text) : otherwise;
}

static int inits, awake, queries;
int stub_inits(void) { return inits; }
int stub_queries(void) { return queries; }

static int refused(void) { return number("STUB_INIT", 0); }

#define NOTHING(name) \
  int name(void) { return 0; }

#ifdef DRIVER
int cuInit(unsigned flags) {
  inits++;
  sleep(number("STUB_DELAY", 0));
  if (flags) return 1;
  if (!refused()) awake = 1;
  return refused();
}
int cuDriverGetVersion(int *version) { *version = number("STUB_VERSION", 12040); return 0; }
int cuDeviceGetCount(int *count) {
  if (!awake) return 3;
  *count = number("STUB_DEVICES", 2);
  return 0;
}
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuPointerGetAttribute(void *out, int attribute, unsigned long long address) {
  (void)out, (void)attribute, (void)address;
  queries++;
  return awake ? 1 : 3;
}
int cuGetErrorName(int code, const char **name) {
  *name = code == 100 ? "CUDA_ERROR_NO_DEVICE" : code == 304 ? "CUDA_ERROR_OPERATING_SYSTEM" : 0;
  return *name ? 0 : 1;
}
int cuGetErrorString(int code, const char **text) {
  *text = code == 100 ? "no CUDA-capable device is detected" : 0;
  return *text ? 0 : 1;
}
NOTHING(cuDevicePrimaryCtxGetState)
NOTHING(cuDevicePrimaryCtxRetain)
NOTHING(cuDevicePrimaryCtxRelease_v2)
NOTHING(cuCtxPushCurrent_v2)
NOTHING(cuCtxPopCurrent_v2)
NOTHING(cuMemHostAlloc)
NOTHING(cuMemFreeHost)
NOTHING(cuMemcpyDtoHAsync_v2)
NOTHING(cuMemcpyHtoDAsync_v2)
NOTHING(cuMemcpyAsync)
NOTHING(cuStreamCreate)
NOTHING(cuStreamDestroy_v2)
NOTHING(cuStreamSynchronize)
NOTHING(cuStreamWaitEvent)
NOTHING(cuEventCreate)
NOTHING(cuEventDestroy_v2)
NOTHING(cuEventRecord)
NOTHING(cuEventSynchronize)
#ifndef LACKS_EVENT_QUERY
NOTHING(cuEventQuery)
#endif
/* The old interface: whoever binds it has the wrong one. */
void cuMemcpyDtoHAsync(void) { abort(); }
void cuMemcpyHtoDAsync(void) { abort(); }
void cuCtxPushCurrent(void) { abort(); }
#endif

#if defined(RUNTIME) || defined(MUSA) || defined(HIP)
#ifdef RUNTIME
#define P(name) cuda##name
#elif defined(MUSA)
#define P(name) musa##name
#else
#define P(name) hip##name
#endif
int P(GetDeviceCount)(int *count) {
  inits++;
  if (refused()) return refused();
  awake = 1;
  *count = number("STUB_DEVICES", 2);
  return 0;
}
int P(DriverGetVersion)(int *version) { *version = number("STUB_DRIVER", 0); return 0; }
int P(RuntimeGetVersion)(int *version) { *version = number("STUB_VERSION", 12090); return 0; }
int P(PointerGetAttributes)(void *out, const void *address) {
  (void)out, (void)address;
  queries++;
  return 1;
}
const char *P(GetErrorName)(int code) { return code == 7 ? "musaErrorNoDevice" : "anErrorName"; }
const char *P(GetErrorString)(int code) { return code ? "an error text" : "no error"; }
NOTHING(P(GetDevice))
NOTHING(P(SetDevice))
NOTHING(P(MemcpyAsync))
NOTHING(P(StreamCreateWithFlags))
NOTHING(P(StreamDestroy))
NOTHING(P(StreamSynchronize))
NOTHING(P(StreamWaitEvent))
NOTHING(P(EventCreateWithFlags))
NOTHING(P(EventDestroy))
NOTHING(P(EventRecord))
NOTHING(P(EventQuery))
NOTHING(P(EventSynchronize))
NOTHING(P(GetLastError))
#ifdef HIP
NOTHING(hipHostMalloc)
NOTHING(hipHostFree)
#else
NOTHING(P(HostAlloc))
NOTHING(P(FreeHost))
#endif
#endif
