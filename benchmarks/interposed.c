/* A count of the CPU allocator's live bytes that knows nothing of Python.
 *
 * Loaded before the C library (LD_PRELOAD) it stands between torch's CPU allocator and posix_memalign and free. Only blocks that one
 * library's code asks for are counted, the one that holds the allocator (libc10.so): its address range is told to interposed_begin.
 * Whoever frees such a block, in whichever thread, is heard. A table of open addressing says how long the block at an address is; a
 * spin lock guards it and the two totals.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define SLOTS (1u << 20)
#define ALIGNMENT 64u /* torch's least: most other blocks need not be looked up when they are freed */

extern void __libc_free(void *);

static struct { uintptr_t address; size_t nbytes; } table[SLOTS];
static atomic_flag lock = ATOMIC_FLAG_INIT;
static _Atomic uintptr_t low, high; /* the library's code; empty: nothing is counted yet */
static long long live, peak, num_blocks, num_lost;

static void enter(void) { while (atomic_flag_test_and_set_explicit(&lock, memory_order_acquire)) { } }
static void leave(void) { atomic_flag_clear_explicit(&lock, memory_order_release); }
static int counts(void *caller) { return (uintptr_t)caller >= low && (uintptr_t)caller < high; }
static uint32_t home(uintptr_t address) { return (uint32_t)((address >> 6) * 0x9E3779B97F4A7C15ull >> 40) & (SLOTS - 1); }

static void put(uintptr_t address, size_t nbytes) {
    if (num_blocks > SLOTS / 2) { num_lost++; return; }
    uint32_t slot = home(address);
    while (table[slot].address) slot = (slot + 1) & (SLOTS - 1);
    table[slot].address = address;
    table[slot].nbytes = nbytes;
    num_blocks++;
    live += (long long)nbytes;
    if (live > peak) peak = live;
}

static void take(uintptr_t address) {
    uint32_t slot = home(address), next;
    while (table[slot].address != address) {
        if (!table[slot].address) return; /* older than the count */
        slot = (slot + 1) & (SLOTS - 1);
    }
    live -= (long long)table[slot].nbytes;
    num_blocks--;
    for (next = (slot + 1) & (SLOTS - 1); table[next].address; next = (next + 1) & (SLOTS - 1)) { /* no gap stays in a run */
        uint32_t wanted = home(table[next].address);
        if (((next - wanted) & (SLOTS - 1)) >= ((next - slot) & (SLOTS - 1))) { table[slot] = table[next]; slot = next; }
    }
    table[slot].address = 0;
}

int posix_memalign(void **block, size_t alignment, size_t nbytes) {
    static int (*original)(void **, size_t, size_t);
    if (!original) original = (int (*)(void **, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
    int failed = original(block, alignment, nbytes);
    if (!failed && counts(__builtin_return_address(0))) { enter(); put((uintptr_t)*block, nbytes); leave(); }
    return failed;
}

void free(void *block) {
    if (block && high && (uintptr_t)block % ALIGNMENT == 0) { enter(); take((uintptr_t)block); leave(); }
    __libc_free(block);
}

void interposed_begin(uintptr_t begin, uintptr_t end) { low = begin; high = end; }
void interposed_reset(void) { enter(); peak = live; leave(); }
long long interposed_live(void) { return live; }
long long interposed_peak(void) { return peak; }
long long interposed_lost(void) { return num_lost; }
