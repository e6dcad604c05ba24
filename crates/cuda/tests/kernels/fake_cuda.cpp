// A driver, an NVRTC and a cuBLASLt that need no device, as one library under three names: memory is the
// host's, work is done at once, and kernels run in the emulator. Variables of the environment choose what the
// driver says: HONE_FAKE_DRIVER, HONE_FAKE_NVRTC, HONE_FAKE_CUBLASLT, HONE_FAKE_DEVICES and
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
#include <string>
#include <vector>

static int setting(const char* name, int otherwise) {
    const char* value = getenv(name);
    return value ? atoi(value) : otherwise;
}

enum { OK = 0, INVALID = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, NOT_FOUND = 500 };

const size_t MEMORY = 1 << 24;
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
    auto found = allocations.find(address);
    if (found == allocations.end()) return INVALID;
    size_t pages = (found->second + 4095) / 4096 * 4096;
    munmap((void*)(address + found->second - pages), pages + 4096);
    allocations.erase(found);
    return OK;
}
int cuMemHostAlloc(void** address, size_t bytes, unsigned) { return *address = malloc(bytes), OK; }
int cuMemFreeHost(void* address) { return free(address), OK; }
int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void*) {
    return memcpy((void*)to, from, bytes), OK;
}
int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void*) {
    return memcpy(to, (const void*)from, bytes), OK;
}

struct Function {
    void (*launch)(const char*, const unsigned*, unsigned, void**);
    std::string name;
};

int cuModuleLoadData(void** module, const void* image) {
    // The sections' table is the end of a library.
    auto header = (const Elf64_Ehdr*)image;
    size_t size = header->e_shoff + (size_t)header->e_shentsize * header->e_shnum;
    int file = memfd_create("module", 0);
    if (write(file, image, size) != (ssize_t)size) return INVALID;
    std::string path = "/proc/self/fd/" + std::to_string(file);
    *module = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!*module) fprintf(stderr, "%s\n", dlerror());
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
    std::string file = std::string(P_tmpdir) + "/hone-module-" + std::to_string(getpid()), macros;
    for (int i = 0; i < count; i++)
        if (!strncmp(options[i], "-D", 2)) macros += std::string(" ") + options[i];
    std::ofstream text(file + ".cpp");
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
    std::string command = "c++ -std=c++17 -O2 -U_FORTIFY_SOURCE -shared -fPIC -DHONE_MODULE" + macros + " -o " +
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

// cuBLASLt.

size_t cublasLtGetVersion() { return setting("HONE_FAKE_CUBLASLT", 130000); }
}
