/* An NVTX tool for tests: writes every marker that a process emits to $NVTX_CAPTURE_OUT.<pid>, one per line:
 *   kind <tab> domain <tab> payload <tab> message
 * Loaded by NVTX itself through NVTX_INJECTION64_PATH, as Nsight Systems is. Handles are leaked on purpose: they
 * may outlive their domain. The entry point is called once per binary that embeds NVTX.
 *
 * With OLDER_THAN_THE_PACKAGE it refuses NVTX's extensions, as Nsight Systems 2022.4 and 2023.4 refuse those of today's
 * headers; with TAKES_NOTHING it takes no event at all either. */
#define NVTX_NO_IMPL
#include <nvtx3/nvToolsExt.h>

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
    char *text;
} named_t;

static void put(const char *kind, const named_t *domain, long long payload, const char *message) {
    char path[4096];
    static char line[1 << 16];
    const char *prefix = getenv("NVTX_CAPTURE_OUT");
    if (!prefix) return;
    snprintf(path, sizeof path, "%s.%d", prefix, (int)getpid());
    int length = snprintf(line, sizeof line, "%s\t%s\t%lld\t%s\n", kind, domain ? domain->text : "", payload, message);
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0644);
    if (file < 0) return;
    if (write(file, line, (size_t)length) != length) abort();
    close(file);
}

static const char *text_of(const nvtxEventAttributes_t *event) {
    if (event->messageType == NVTX_MESSAGE_TYPE_REGISTERED) return ((const named_t *)event->message.registered)->text;
    if (event->messageType == NVTX_MESSAGE_TYPE_ASCII) return event->message.ascii;
    return "";
}

static long long payload_of(const nvtxEventAttributes_t *event) {
    return event->payloadType == NVTX_PAYLOAD_TYPE_INT64 ? (long long)event->payload.llValue : -1;
}

static void *named(const char *text) {
    named_t *made = malloc(sizeof *made);
    made->text = strdup(text);
    return made;
}

static nvtxDomainHandle_t NVTX_API domain_create(const char *name) { return (nvtxDomainHandle_t)named(name); }

static nvtxStringHandle_t NVTX_API register_string(nvtxDomainHandle_t domain, const char *text) {
    put("register", (named_t *)domain, -1, text);
    return (nvtxStringHandle_t)named(text);
}

static void NVTX_API mark(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *event) {
    put("mark", (named_t *)domain, payload_of(event), text_of(event));
}

static int NVTX_API push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *event) {
    put("push", (named_t *)domain, payload_of(event), text_of(event));
    return 0;
}

static int NVTX_API pop(nvtxDomainHandle_t domain) {
    put("pop", (named_t *)domain, -1, "");
    return 0;
}

static nvtxRangeId_t NVTX_API start(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *event) {
    put("start", (named_t *)domain, payload_of(event), text_of(event));
    return 1;
}

static void NVTX_API end(nvtxDomainHandle_t domain, nvtxRangeId_t range) { put("end", (named_t *)domain, range, ""); }

#ifdef OLDER_THAN_THE_PACKAGE
NVTX_DYNAMIC_EXPORT int NVTX_API InitializeInjectionNvtxExtension(void *module) {
    (void)module;
    return 0;
}
#endif

NVTX_DYNAMIC_EXPORT int NVTX_API InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table) {
    const NvtxExportTableCallbacks *callbacks = get_table(NVTX_ETID_CALLBACKS);
    NvtxFunctionTable table;
    unsigned int size = 0;
    if (!callbacks || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size)) return 0;
#ifdef TAKES_NOTHING
    return 1;
#endif
    *table[NVTX_CBID_CORE2_DomainCreateA] = (NvtxFunctionPointer)domain_create;
    *table[NVTX_CBID_CORE2_DomainRegisterStringA] = (NvtxFunctionPointer)register_string;
    *table[NVTX_CBID_CORE2_DomainMarkEx] = (NvtxFunctionPointer)mark;
    *table[NVTX_CBID_CORE2_DomainRangePushEx] = (NvtxFunctionPointer)push;
    *table[NVTX_CBID_CORE2_DomainRangePop] = (NvtxFunctionPointer)pop;
    *table[NVTX_CBID_CORE2_DomainRangeStartEx] = (NvtxFunctionPointer)start;
    *table[NVTX_CBID_CORE2_DomainRangeEnd] = (NvtxFunctionPointer)end;
    return 1;
}
