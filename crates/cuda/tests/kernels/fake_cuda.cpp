// A driver, an NVRTC and a cuBLASLt that need no device, as one library under three names: memory is the
// host's, work is done at once, and kernels run in the emulator. Variables of the environment choose what the
// driver says: HONE_FAKE_DRIVER, HONE_FAKE_NVRTC, HONE_FAKE_CUBLASLT, HONE_FAKE_DEVICES, HONE_FAKE_MEMORY and
// HONE_FAKE_CAPABILITY. HONE_FAKE_EMULATOR is the path of emulator.h.
//
// NVRTC compiles a source to a shared library with emulator.h, whose bytes are the "cubin".
#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <vector>

static int setting(const char* name, int otherwise) {
    const char* value = getenv(name);
    return value ? atoi(value) : otherwise;
}

enum { OK = 0, INVALID = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, NOT_FOUND = 500 };

static const size_t MEMORY = setting("HONE_FAKE_MEMORY", 1 << 24);
// Threads take turns: the emulator runs one block at a time.
static std::mutex turn;
static std::map<uint64_t, size_t> allocations;
static thread_local void* current_context;

static size_t used() {
    size_t sum = 0;
    for (auto& allocation : allocations) sum += allocation.second;
    return sum;
}

extern "C" {

// The driver.

int cuInit(unsigned) { return setting("HONE_FAKE_DEVICES", 1) ? OK : NO_DEVICE; }
int cuDriverGetVersion(int* version) { return *version = setting("HONE_FAKE_DRIVER", 13000), OK; }
int cuDeviceGetCount(int* count) { return *count = setting("HONE_FAKE_DEVICES", 1), OK; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, OK; }
int cuDeviceGetName(char* name, int size, int) { return snprintf(name, size, "Emulated"), OK; }
int cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = MEMORY, OK; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
    int capability = setting("HONE_FAKE_CAPABILITY", 90);
    std::map<int, int> values = {{16, 4}, {75, capability / 10}, {76, capability % 10}, {97, 49152}};
    return *value = values[attribute], OK;
}
int cuDevicePrimaryCtxRetain(void** context, int) { return *context = (void*)1, OK; }
int cuDevicePrimaryCtxRelease_v2(int) { return OK; }
int cuCtxGetCurrent(void** context) { return *context = current_context, OK; }
int cuCtxSetCurrent(void* context) { return current_context = context, OK; }
int cuCtxSynchronize() { return OK; }
int cuCtxGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -5, OK; }
int cuGetErrorString(int, const char** text) { return *text = "an error", OK; }
int cuStreamCreateWithPriority(void** stream, unsigned, int) { return *stream = (void*)2, OK; }
int cuStreamDestroy_v2(void*) { return OK; }
int cuStreamSynchronize(void*) { return OK; }
int cuEventCreate(void** event, unsigned) { return *event = (void*)3, OK; }
int cuEventDestroy_v2(void*) { return OK; }
int cuEventRecord(void*, void*) { return OK; }
int cuEventSynchronize(void*) { return OK; }
int cuMemGetInfo_v2(size_t* free, size_t* total) { return *free = MEMORY - used(), *total = MEMORY, OK; }
int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    if (bytes == 0) return INVALID;
    std::lock_guard<std::mutex> lock(turn);
    if (bytes > MEMORY - used()) return OUT_OF_MEMORY;
    // A page that cannot be accessed follows.
    size_t pages = (bytes + 4095) / 4096 * 4096;
    char* start =
        (char*)mmap(nullptr, pages + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(start + pages, 4096, PROT_NONE);
    memset(start, 0xff, pages);
    *address = (uint64_t)(start + pages - bytes);
    allocations[*address] = bytes;
    return OK;
}
int cuMemFree_v2(uint64_t address) {
    std::lock_guard<std::mutex> lock(turn);
    auto found = allocations.find(address);
    if (found == allocations.end()) return INVALID;
    size_t pages = (found->second + 4095) / 4096 * 4096;
    munmap((void*)(address + found->second - pages), pages + 4096);
    allocations.erase(found);
    return OK;
}
int cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, void*) {
    return memset((void*)to, value, bytes), OK;
}
int cuMemHostAlloc(void** address, size_t bytes, unsigned) { return *address = malloc(bytes), OK; }
int cuMemFreeHost(void* address) { return free(address), OK; }
int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void*) {
    return memcpy((void*)to, from, bytes), OK;
}
int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void*) {
    return memcpy(to, (const void*)from, bytes), OK;
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void*) {
    return memcpy((void*)to, (const void*)from, bytes), OK;
}

struct Function {
    void (*launch)(const char*, const unsigned*, unsigned, void**);
    std::string name;
};

int cuModuleLoadData(void** module, const void* image) {
    std::lock_guard<std::mutex> lock(turn);
    // The sections' table is the end of a library.
    auto header = (const Elf64_Ehdr*)image;
    size_t size = header->e_shoff + (size_t)header->e_shentsize * header->e_shnum;
    // A library that is open already is not opened again.
    static std::map<std::string, void*> open;
    void*& known = open[std::string((const char*)image, size)];
    if ((*module = known)) return OK;
    int file = memfd_create("module", 0);
    if (write(file, image, size) != (ssize_t)size) return INVALID;
    std::string path = "/proc/self/fd/" + std::to_string(file);
    *module = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!*module) fprintf(stderr, "%s\n", dlerror());
    known = *module;
    return *module ? OK : INVALID;
}
int cuModuleUnload(void*) { return OK; }
int cuModuleGetFunction(void** function, void* module, const char* name) {
    auto launch = (void (*)(const char*, const unsigned*, unsigned, void**))dlsym(module, "hone_launch");
    if (!launch) return NOT_FOUND;
    *function = new Function{launch, name};
    return OK;
}
int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
                   unsigned, void*, void** arguments, void**) {
    std::lock_guard<std::mutex> lock(turn);
    unsigned grid[3] = {x, y, z};
    auto* of = (Function*)function;
    of->launch(of->name.c_str(), grid, threads, arguments);
    return OK;
}

// NVRTC.

struct Program {
    std::string source, log;
    std::vector<char> cubin;
};

int nvrtcVersion(int* major, int* minor) {
    int version = setting("HONE_FAKE_NVRTC", 1300);
    return *major = version / 100, *minor = version % 100, OK;
}
int nvrtcCreateProgram(Program** program, const char* source, const char*, int, const char**, const char**) {
    return *program = new Program{source, "", {}}, OK;
}
int nvrtcDestroyProgram(Program** program) { return delete *program, OK; }
int nvrtcCompileProgram(Program* program, int count, const char** options) {
    std::lock_guard<std::mutex> lock(turn);
    std::string file = std::string(P_tmpdir) + "/hone-module-" + std::to_string(getpid()), macros;
    for (int i = 0; i < count; i++)
        if (!strncmp(options[i], "-D", 2)) macros += std::string(" ") + options[i];
    std::ofstream text(file + ".cpp");
    // Everything else is hidden: static variables of templates would be the same ones in all modules.
    text << "extern \"C\" __attribute__((visibility(\"default\"))) void hone_launch(const char*, const unsigned*, "
            "unsigned, void**);\n";
    text << "#include \"" << getenv("HONE_FAKE_EMULATOR") << "\"\n" << program->source;
    text << "\nstatic const std::map<std::string, Kernel>& all_kernels() {\n"
            "static const std::map<std::string, Kernel> all = {\n";
    const std::string before = "__global__ void __launch_bounds__(";
    for (size_t at = 0; (at = program->source.find(before, at)) != std::string::npos;) {
        at = program->source.find_first_not_of(" \n", program->source.find(')', at) + 1);
        text << "KERNEL(" << program->source.substr(at, program->source.find('(', at) - at) << ")\n";
    }
    text << "};\nreturn all;\n}\n";
    text.close();
    std::string command = "c++ -std=c++17 -O2 -U_FORTIFY_SOURCE -shared -fPIC -fvisibility=hidden -DHONE_MODULE" + macros + " -o " +
                          file + " " + file + ".cpp > " + file + ".log 2>&1";
    int status = system(command.c_str());
    auto bytes = [](const std::string& name) {
        std::ifstream in(name, std::ios::binary);
        return std::vector<char>(std::istreambuf_iterator<char>(in), {});
    };
    auto log = bytes(file + ".log");
    program->log.assign(log.begin(), log.end());
    program->cubin = bytes(file);
    for (const char* ending : {"", ".cpp", ".log"}) unlink((file + ending).c_str());
    return status == 0 ? OK : 6;
}
int nvrtcGetProgramLogSize(Program* program, size_t* size) { return *size = program->log.size() + 1, OK; }
int nvrtcGetProgramLog(Program* program, char* log) { return strcpy(log, program->log.c_str()), OK; }
int nvrtcGetCUBINSize(Program* program, size_t* size) { return *size = program->cubin.size(), OK; }
int nvrtcGetCUBIN(Program* program, char* cubin) {
    return memcpy(cubin, program->cubin.data(), program->cubin.size()), OK;
}
const char* nvrtcGetErrorString(int) { return "an error"; }

// cuBLASLt: products in loops. Matrices are stored by columns.

enum { INVALID_VALUE = 7, NOT_SUPPORTED = 15, FLOAT = 0, BFLOAT = 14 };

struct Layout {
    int type;
    uint64_t rows, columns;
    int64_t stride;

    const char* at(const void* matrix, uint64_t row, uint64_t column) const {
        return (const char*)matrix + (row + column * stride) * (type == FLOAT ? 4 : 2);
    }
};

struct Operation {
    int transposed[2];
    unsigned epilogue;
    const void* bias;
};

// The workspace, the allowed schemes of reduction and the alignment of A, B, C and D.
struct Preference {
    uint64_t workspace;
    unsigned schemes, alignments[4];
};

// What was chosen for: the workspace, the alignments and the epilogue.
struct Algorithm {
    uint64_t magic, workspace;
    unsigned alignments[4], epilogue, unused[7];
};

static float read_float(int type, const void* at) {
    if (type == FLOAT) return *(const float*)at;
    uint32_t bits = (uint32_t) * (const uint16_t*)at << 16;
    float value;
    return memcpy(&value, &bits, 4), value;
}

static void write_float(int type, void* at, float value) {
    if (type == FLOAT) {
        *(float*)at = value;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &value, 4);
    *(uint16_t*)at = value != value ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

size_t cublasLtGetVersion() { return setting("HONE_FAKE_CUBLASLT", 130000); }
int cublasLtCreate(void** handle) { return *handle = (void*)4, OK; }
int cublasLtDestroy(void*) { return OK; }
int cublasLtMatrixLayoutCreate(Layout** layout, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    if ((type != FLOAT && type != BFLOAT) || stride < (int64_t)rows) return INVALID_VALUE;
    return *layout = new Layout{type, rows, columns, stride}, OK;
}
int cublasLtMatrixLayoutDestroy(Layout* layout) { return delete layout, OK; }
int cublasLtMatmulDescCreate(Operation** operation, int compute, int scale) {
    if (compute != 68 || scale != FLOAT) return INVALID_VALUE;
    return *operation = new Operation{{0, 0}, 1, nullptr}, OK;
}
int cublasLtMatmulDescDestroy(Operation* operation) { return delete operation, OK; }
int cublasLtMatmulDescSetAttribute(Operation* operation, int attribute, const void* value, size_t size) {
    if (size != (attribute == 8 ? 8 : 4)) return INVALID_VALUE;
    if (attribute == 3 || attribute == 4) operation->transposed[attribute - 3] = *(const int*)value;
    else if (attribute == 7) operation->epilogue = *(const unsigned*)value;
    else if (attribute == 8) operation->bias = *(const void* const*)value;
    else return INVALID_VALUE;
    return OK;
}
int cublasLtMatmulPreferenceCreate(Preference** preference) {
    return *preference = new Preference{0, 7, {256, 256, 256, 256}}, OK;
}
int cublasLtMatmulPreferenceDestroy(Preference* preference) { return delete preference, OK; }
int cublasLtMatmulPreferenceSetAttribute(Preference* preference, int attribute, const void* value, size_t size) {
    if (size != (attribute == 1 ? 8 : 4)) return INVALID_VALUE;
    if (attribute == 1) preference->workspace = *(const uint64_t*)value;
    else if (attribute == 3) preference->schemes = *(const unsigned*)value;
    else if (attribute >= 5 && attribute <= 8) preference->alignments[attribute - 5] = *(const unsigned*)value;
    else return INVALID_VALUE;
    return OK;
}

// Rows and columns of a factor, and whether types and sizes fit.
static uint64_t side(const Operation* operation, int factor, const Layout* layout, bool columns) {
    return columns == (operation->transposed[factor] != 0) ? layout->rows : layout->columns;
}
static bool fits(const Operation* operation, const Layout* a, const Layout* b, const Layout* d) {
    return side(operation, 0, a, true) == side(operation, 1, b, false) && side(operation, 0, a, false) == d->rows &&
           side(operation, 1, b, true) == d->columns && a->type == b->type && (a->type == d->type || d->type == FLOAT);
}

struct Heuristic {
    Algorithm algorithm;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};
int cublasLtMatmulAlgoGetHeuristic(void*, Operation* operation, Layout* a, Layout* b, Layout*, Layout* d,
                                   Preference* preference, int, Heuristic* found, int* count) {
    // Sums that are rounded to the type of the result are refused.
    if (!fits(operation, a, b, d) || preference->schemes != 2) return *count = 0, OK;
    Algorithm algorithm = {0x686f6e65, preference->workspace, {}, operation->epilogue, {}};
    memcpy(algorithm.alignments, preference->alignments, sizeof algorithm.alignments);
    return *found = Heuristic{algorithm, preference->workspace, OK, 1, {}}, *count = 1, OK;
}

// D = alpha A B + beta C + bias
int cublasLtMatmul(void*, const Operation* operation, const float* alpha, const void* a, const Layout* of_a,
                   const void* b, const Layout* of_b, const float* beta, const void* c, const Layout*, void* d,
                   const Layout* of_d, const Algorithm* algorithm, void* workspace, size_t size, void*) {
    if (algorithm->magic != 0x686f6e65 || algorithm->epilogue != operation->epilogue ||
        size < algorithm->workspace || !fits(operation, of_a, of_b, of_d))
        return INVALID_VALUE;
    const void* matrices[] = {a, b, c, d};
    for (int i = 0; i < 4; i++)
        if ((uint64_t)matrices[i] % algorithm->alignments[i] != 0) return NOT_SUPPORTED;
    // It may be used.
    memset(workspace, 0xff, size);
    bool by_rows[] = {operation->transposed[0] != 0, operation->transposed[1] != 0};
    for (uint64_t column = 0; column < of_d->columns; column++)
        for (uint64_t row = 0; row < of_d->rows; row++) {
            float sum = 0;
            for (uint64_t k = 0; k < side(operation, 0, of_a, true); k++)
                sum += read_float(of_a->type, by_rows[0] ? of_a->at(a, k, row) : of_a->at(a, row, k)) *
                       read_float(of_b->type, by_rows[1] ? of_b->at(b, column, k) : of_b->at(b, k, column));
            sum *= *alpha;
            if (*beta != 0) sum += *beta * read_float(of_d->type, of_d->at(c, row, column));
            if (operation->epilogue == 4)
                sum += read_float(of_d->type, (const char*)operation->bias + row * (of_d->type == FLOAT ? 4 : 2));
            write_float(of_d->type, (void*)of_d->at(d, row, column), sum);
        }
    return OK;
}
}
