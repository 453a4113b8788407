// Runs a kernel's blocks one after the other, a block's threads as fibers: each goes on until it waits for others, in
// the one order or the other, so that what no barrier orders comes in both. A launch ends at its first fault.

#include "engine.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <deque>
#include <map>
#include <vector>

extern "C" {
Dim3 emu_thread, emu_block, emu_grid;
constexpr unsigned PAGE = 4096, MOST_SHARED = 256 << 10;
alignas(PAGE) char emu_shared[MOST_SHARED];
// Saves what a function call keeps on the stack of the one, whose place is left in `from`, and goes on on the other's.
void emu_switch(void** from, void* to);
}
asm(R"(.globl emu_switch
emu_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");

namespace {

constexpr unsigned STACK = 256 << 10, MOST_THREADS = 1024, WARP = 32;
constexpr int POISON = 0xff;

struct Copy { void* to; const void* from; int bytes, copied; };
enum class State { RUNS, AT_BARRIER, AT_WARP_BARRIER, ENDED };
struct Fiber {
    void* stack_pointer;
    State state;
    std::deque<std::vector<Copy>> copies;  // groups, the last of them open
};
struct Tensor { const char *pages_end, *begin, *end; };

Fiber fibers[MOST_THREADS];
unsigned current, n_threads;
char* stacks;
void* scheduler;
unsigned long long slots[MOST_THREADS / WARP][WARP];
bool failed;
char message[300];
void (*kernel)(const void*);
const void* parameters;
std::map<const char*, Tensor> tensors;  // by where their pages begin
std::vector<const char*> windows;       // of shared memory, for addresses of 32 bits
constexpr unsigned WINDOW_BITS = 20;

void leave() { emu_switch(&fibers[current].stack_pointer, scheduler); }

void start() {
    kernel(parameters);
    fibers[current].state = State::ENDED;
    leave();
}

const Tensor* tensor_of(const char* at) {
    auto found = tensors.upper_bound(at);
    if (found == tensors.begin()) return nullptr;
    --found;
    return at < found->second.pages_end + PAGE ? &found->second : nullptr;  // there the guarded page begins
}

void on_signal(int number, siginfo_t* info, void*) {
    if (number == SIGILL) emu::fail("misaligned access");
    const char* what = info->si_addr >= emu_shared && info->si_addr < emu_shared + MOST_SHARED
        ? "access behind the shared memory of the launch" : "access outside of every tensor";
    emu::fail(what);
}

// While kernels run; pytest's own handlers are to tell of what else goes wrong.
struct Signals {
    struct sigaction before[3];
    static constexpr int NUMBERS[3] = {SIGSEGV, SIGBUS, SIGILL};
    Signals() {
        struct sigaction ours = {};
        ours.sa_sigaction = on_signal;
        ours.sa_flags = SA_SIGINFO | SA_NODEFER;  // which is never returned from
        for (int k = 0; k < 3; ++k) sigaction(NUMBERS[k], &ours, &before[k]);
    }
    ~Signals() {
        for (int k = 0; k < 3; ++k) sigaction(NUMBERS[k], &before[k], nullptr);
    }
};

void begin(unsigned thread) {
    auto* top = reinterpret_cast<void**>(stacks + static_cast<size_t>(thread + 1) * STACK - 64);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(start);
    for (int k = 0; k < 6; ++k) *--top = nullptr;
    fibers[thread] = {top, State::RUNS, {{}}};
}

// Whether one of them did.
bool run_those_that_can(bool last_first) {
    bool any = false;
    for (unsigned k = 0; k < n_threads && !failed; ++k) {
        current = last_first ? n_threads - 1 - k : k;
        if (fibers[current].state != State::RUNS) continue;
        emu_thread = {current, 0, 0};
        emu_switch(&scheduler, fibers[current].stack_pointer);
        any = true;
    }
    return any;
}

unsigned count(unsigned first, unsigned end, State state) {
    unsigned n = 0;
    for (unsigned t = first; t < end; ++t) n += fibers[t].state == state;
    return n;
}

bool release(unsigned first, unsigned end, State from) {
    if (count(first, end, from) != end - first) return false;
    for (unsigned t = first; t < end; ++t) fibers[t].state = State::RUNS;
    return true;
}

void note(const char* what) {
    failed = true;
    snprintf(message, sizeof message, "%s (block %u, %u; thread %u)", what, emu_block.x, emu_block.y, current);
}

void run_block() {
    for (unsigned t = 0; t < n_threads; ++t) begin(t);
    const bool last_first = emu_block.x % 2;
    while (count(0, n_threads, State::ENDED) < n_threads) {
        bool any = run_those_that_can(last_first);
        if (failed) return;
        for (unsigned first = 0; first < n_threads; first += WARP)
            any |= release(first, first + WARP < n_threads ? first + WARP : n_threads, State::AT_WARP_BARRIER);
        if (!any && !release(0, n_threads, State::AT_BARRIER)) {
            note(count(0, n_threads, State::AT_WARP_BARRIER) ? "lanes of a warp wait for others that do not come"
                                                             : "some threads wait at a barrier, others have ended");
            return;
        }
    }
}

// What lies beside tensors in their pages.
void see_what_lies_beside() {
    for (const auto& [pages, tensor] : tensors) {
        bool whole = true;
        for (const char* at = pages; at < tensor.begin; ++at) whole &= *at == static_cast<char>(POISON);
        for (const char* at = tensor.end; at < tensor.pages_end; ++at) whole &= *at == static_cast<char>(POISON);
        if (!whole) note("store beside a tensor");
    }
}

}  // namespace

namespace emu {

void fail(const char* what) {
    note(what);
    for (;;) leave();
}
void meet_block() { fibers[current].state = State::AT_BARRIER, leave(); }
void meet_warp() { fibers[current].state = State::AT_WARP_BARRIER, leave(); }
int count_in_block(bool holds) {
    static int total;
    meet_block();
    total = 0;
    meet_block();
    total += holds;
    meet_block();
    return total;
}
unsigned long long* warp_slots() { return slots[current / WARP]; }

void check(const void* address, int bytes, bool writes) {
    const char* at = static_cast<const char*>(address);
    char what[120];
    if (reinterpret_cast<unsigned long long>(at) % bytes) {
        snprintf(what, sizeof what, "misaligned %s of %d bytes", writes ? "store" : "load", bytes);
        fail(what);
    }
    const Tensor* tensor = tensor_of(at);
    if (!tensor) return;  // torch's own memory
    // A load has an element at least: what else is in its 16 bytes can be read, and some kernels do so.
    const int within = writes ? bytes : 1;
    if (at + bytes < tensor->begin + within || at + within > tensor->end) {
        snprintf(what, sizeof what, "%s of %d bytes %td bytes from the start of a tensor of %td", writes ? "store" : "load",
                 bytes, at - tensor->begin, tensor->end - tensor->begin);
        fail(what);
    }
}

unsigned shared_handle(const void* address) {
    const char* at = static_cast<const char*>(address);
    const char* window = at - reinterpret_cast<unsigned long long>(at) % (1u << WINDOW_BITS);
    unsigned k = 0;
    while (k < windows.size() && windows[k] != window) ++k;
    if (k == windows.size()) windows.push_back(window);
    return k << (WINDOW_BITS + 1) | static_cast<unsigned>(at - window);  // twice as far apart: steps may lead out of one
}

void copy_later(unsigned shared, const void* from, int bytes, int copied) {
    const unsigned within = (2u << WINDOW_BITS) - 1;
    char* to = const_cast<char*>(windows[shared >> (WINDOW_BITS + 1)]) + (shared & within);
    if (reinterpret_cast<unsigned long long>(to) % bytes) fail("misaligned copy into shared memory");
    if (copied) check(from, bytes, false);
    fibers[current].copies.back().push_back({to, from, bytes, copied});
}

void commit_copies() { fibers[current].copies.emplace_back(); }

void wait_for_copies(int groups) {
    auto& copies = fibers[current].copies;
    for (; static_cast<int>(copies.size()) - 1 > groups; copies.pop_front())
        for (const Copy& copy : copies.front()) {
            memcpy(copy.to, copy.from, copy.copied);
            memset(static_cast<char*>(copy.to) + copy.copied, 0, copy.bytes - copy.copied);
        }
}

}  // namespace emu

extern "C" void emu_register(const char* pages, const char* pages_end, const char* begin, const char* end) {
    tensors[pages] = {pages_end, begin, end};
}
extern "C" void emu_forget(const char* pages) { tensors.erase(pages); }

// The first fault, or null.
extern "C" const char* emu_launch(void (*entry)(const void*), const void* params, unsigned x, unsigned y, unsigned block,
                                  unsigned shared) {
    if (!stacks)
        stacks = static_cast<char*>(mmap(nullptr, static_cast<size_t>(MOST_THREADS) * STACK, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    const unsigned pages = (shared + PAGE - 1) / PAGE * PAGE;
    mprotect(emu_shared + pages, MOST_SHARED - pages, PROT_NONE);
    Signals signals;
    kernel = entry, parameters = params, n_threads = block, emu_grid = {x, y, 1}, failed = false;
    for (unsigned n = x * y; n > 0 && !failed; --n) {  // the last first: order is not defined
        emu_block = {(n - 1) % x, (n - 1) / x, 0};
        memset(emu_shared, POISON, pages);
        run_block();
    }
    mprotect(emu_shared, MOST_SHARED, PROT_READ | PROT_WRITE);
    if (!failed) see_what_lies_beside();
    return failed ? message : nullptr;
}
