// CUDA C as tinygrad writes it, on a CPU: what a kernel's text is compiled with (see compiler.py). Freestanding: no
// headers, no libraries, no data of its own, so that the code can lie anywhere.
//
// A thread of a block has a stack of its own: it runs until a barrier, and goes on when all of its block have come that
// far. Meanwhile a warp goes as far as it can, the first one first or the last: where a barrier is missing between two
// of them, one order at least finds what is not there yet, or is no longer there. (As coroutines of C++, kernels take
// three times as long to compile.)
// Every access to global or shared memory goes through the GPU's page table, windows and bounds, and is checked for
// alignment, as the hardware does. A fault is noted once, and the kernel goes on in a scrap of memory until it ends.

#define __device__ static inline
#define __forceinline__
#define __align__(n) alignas(n)
#define MEMBER inline
#define INLINE static MEMBER

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long u64;
typedef decltype(sizeof 0) size_t;
typedef _Float16 half;
typedef __bf16 nv_bfloat16;

struct dim3 { u32 x, y, z; };
struct Functions { float (*exp2)(float), (*log2)(float), (*sin)(float); };
enum { OK, UNMAPPED, WINDOW, MISALIGNED, SHARED_RANGE, DIVERGENT, NO_ROOM };

struct Context {  // as in program.py
  const u64 *pages; u64 n_pages;                  // address in this process of each page, or 0
  u64 local_window, shared_window, window_bytes;
  const u8 *constants; u8 *shared; u64 shared_bytes;
  u8 *heap; u64 heap_bytes;                       // for threads and their stacks
  dim3 grid, block;
  Functions functions;
  u64 fault, fault_address, loads_and_stores, backwards;
  struct Thread *running;
  void *launcher;                                 // where its stack ends while a thread runs
  u8 scrap[64];
};

extern "C" __attribute__((used)) void *memcpy(void *to, const void *from, size_t n) {
  for (size_t i = 0; i < n; i++) ((volatile u8 *)to)[i] = ((const volatile u8 *)from)[i];
  return to;
}
extern "C" __attribute__((used)) void *memset(void *to, int value, size_t n) {
  for (size_t i = 0; i < n; i++) ((volatile u8 *)to)[i] = (u8)value;
  return to;
}

// ---- memory ----

__attribute__((noinline)) static u8 *fault(Context *c, u64 kind, u64 address) {
  if (!c->fault) c->fault = kind, c->fault_address = address;
  return c->scrap;
}
static u8 *at_global(Context *c, u64 va, u64 size) {
  c->loads_and_stores++;
  if (va % size) return fault(c, MISALIGNED, va);
  if (va - c->local_window < c->window_bytes || va - c->shared_window < c->window_bytes) return fault(c, WINDOW, va);
  u64 page = va >> 12;
  if (page >= c->n_pages || !c->pages[page]) return fault(c, UNMAPPED, va);
  return (u8 *)c->pages[page] + (va & 4095);
}
static u8 *at_shared(Context *c, u64 offset, u64 size) {
  if (offset % size) return fault(c, MISALIGNED, offset);
  if (offset + size > c->shared_bytes) return fault(c, SHARED_RANGE, offset);
  return c->shared + offset;
}
constexpr u64 access_bytes(u64 size) { u64 n = 1; while (n < size) n *= 2; return n > 16 ? 16 : n; }

template <class T> struct global {
  Context *c; u64 va;
  MEMBER global operator+(long i) const { return {c, va + (u64)i * sizeof(T)}; }
  T &operator*() const { return *(T *)at_global(c, va, access_bytes(sizeof(T))); }
};
template <class T> struct local {
  Context *c; u64 offset;
  MEMBER local operator+(long i) const { return {c, offset + (u64)i * sizeof(T)}; }
  T &operator*() const { return *(T *)at_shared(c, offset, access_bytes(sizeof(T))); }
};
template <class U, class T> INLINE global<U> pointer_cast(global<T> p) { return {p.c, p.va}; }
template <class U, class T> INLINE local<U> pointer_cast(local<T> p) { return {p.c, p.offset}; }
template <class U, class T> INLINE U *pointer_cast(T *p) { return (U *)p; }

// cp.async of 16 bytes: a thread's copies, in groups. None arrives before the thread waits for it.
struct Copies {
  struct { local<char> to; global<char> from; u32 group; } asked[64];
  u32 n = 0, group = 0;
  template <class T, class U> MEMBER void ask(local<T> to, global<U> from) {
    if (n == 64) return (void)fault(to.c, NO_ROOM, n);
    asked[n++] = {pointer_cast<char>(to), pointer_cast<char>(from), group};
  }
  MEMBER void commit() { group++; }
  MEMBER void wait(u32 but) {
    u32 left = 0;
    for (u32 i = 0; i < n; i++)
      if (asked[i].group + but < group)
        memcpy(at_shared(asked[i].to.c, asked[i].to.offset, 16), at_global(asked[i].to.c, asked[i].from.va, 16), 16);
      else asked[left++] = asked[i];
    n = left;
  }
};

template <class T> INLINE T value_parameter(Context *c, u32 offset) { return *(const T *)(c->constants + offset); }
template <class T> INLINE global<T> pointer_parameter(Context *c, u32 offset) {
  return {c, *(const u64 *)(c->constants + offset)};
}

// ---- vectors, numbers ----

#define VECTORS(T, name)                                                                                              \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                                                  \
  struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) name##4 { T x, y, z, w; };                                  \
  INLINE name##2 make_##name##2(T x, T y) { return {x, y}; }                                                          \
  INLINE name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
VECTORS(float, float)
VECTORS(int, int)
VECTORS(unsigned int, uint)
VECTORS(long, long)
struct alignas(4) half2 { half x, y; };
INLINE half2 make_half2(half x, half y) { return {x, y}; }
typedef half2 __half2;
INLINE half __low2half(half2 a) { return a.x; }
INLINE half __high2half(half2 a) { return a.y; }
INLINE half2 __float2half2_rn(float a) { return {(half)a, (half)a}; }
INLINE half2 __floats2half2_rn(float a, float b) { return {(half)a, (half)b}; }
INLINE half2 __halves2half2(half a, half b) { return {a, b}; }
INLINE half2 __hsub2(half2 a, half2 b) { return {(half)(a.x - b.x), (half)(a.y - b.y)}; }
INLINE half2 __hmul2(half2 a, half2 b) { return {(half)(a.x * b.x), (half)(a.y * b.y)}; }
INLINE half fused(half a, half b, half c) { return (half)((float)a * (float)b + (float)c); }
INLINE half2 __hfma2(half2 a, half2 b, half2 c) { return {fused(a.x, b.x, c.x), fused(a.y, b.y, c.y)}; }
INLINE unsigned int __nvvm_prmt(unsigned int low, unsigned int high, unsigned int places) {
  unsigned long long bytes = (unsigned long long)high << 32 | low;
  unsigned int result = 0;
  for (int i = 0; i < 4; i++) {
    unsigned int place = places >> 4 * i, byte = (unsigned int)(bytes >> (place & 7) * 8) & 255;
    result |= (place & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * i;
  }
  return result;
}
INLINE unsigned int __byte_perm(unsigned int low, unsigned int high, unsigned int places) {
  return __nvvm_prmt(low, high, places & 0x7777);
}

INLINE int __dp4a(int a, int b, int sum) {
  for (int i = 0; i < 4; i++) sum += (signed char)(a >> 8 * i) * (signed char)(b >> 8 * i);
  return sum;
}

INLINE float __int_as_float(int i) { return __builtin_bit_cast(float, i); }
#define sqrt(x) __builtin_sqrtf(x)
#define trunc(x) __builtin_truncf(x)
INLINE float fmaxf(float a, float b) { return a < b || a != a ? b : a; }
#define exp2(x) context->functions.exp2(x)
#define __nvvm_ex2_approx_ftz_f(x) exp2(x)
#define __fdividef(x, y) ((x) / (y))
#define rsqrtf(x) (1.0f / __builtin_sqrtf(x))
#define log2(x) context->functions.log2(x)
#define sin(x) context->functions.sin(x)
#define hsqrt(x) ((half)__builtin_sqrtf((float)(x)))
#define htrunc(x) ((half)__builtin_truncf((float)(x)))
#define hexp2(x) ((half)exp2((float)(x)))
#define hlog2(x) ((half)log2((float)(x)))
#define hsin(x) ((half)sin((float)(x)))
#define hrcp(x) ((half)(1.0f / (float)(x)))

// ---- threads ----

// Goes on where the stack `to` was left. Notes in `from` where this one ends. What a called function must preserve is
// kept on the stacks. A new stack holds `function` and `argument` in the places of two of these registers.
#if defined(__x86_64__)
__attribute__((naked, noinline)) static void go_on(void **from, void *to) {
  asm("pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15; movq %rsp, (%rdi)\n"
      "movq %rsi, %rsp; popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp; ret");
}
__attribute__((naked)) static void begin() { asm("movq %r13, %rdi; callq *%r12; ud2"); }
static void *new_stack(u8 *end, void (*function)(void *), void *argument) {
  void **top = (void **)end - 9;  // r15, r14, r13, r12, rbx, rbp, the return address; calls have aligned stacks
  top[2] = argument, top[3] = (void *)function, top[6] = (void *)begin;
  return top;
}
#elif defined(__aarch64__)
__attribute__((naked, noinline)) static void go_on(void **from, void *to) {
  asm("sub sp, sp, #160; stp x19, x20, [sp]; stp x21, x22, [sp, #16]; stp x23, x24, [sp, #32]\n"
      "stp x25, x26, [sp, #48]; stp x27, x28, [sp, #64]; stp x29, x30, [sp, #80]; stp d8, d9, [sp, #96]\n"
      "stp d10, d11, [sp, #112]; stp d12, d13, [sp, #128]; stp d14, d15, [sp, #144]; mov x9, sp; str x9, [x0]\n"
      "mov sp, x1; ldp x19, x20, [sp]; ldp x21, x22, [sp, #16]; ldp x23, x24, [sp, #32]\n"
      "ldp x25, x26, [sp, #48]; ldp x27, x28, [sp, #64]; ldp x29, x30, [sp, #80]; ldp d8, d9, [sp, #96]\n"
      "ldp d10, d11, [sp, #112]; ldp d12, d13, [sp, #128]; ldp d14, d15, [sp, #144]; add sp, sp, #160; ret");
}
__attribute__((naked)) static void begin() { asm("mov x0, x20; blr x19; brk #1"); }
static void *new_stack(u8 *end, void (*function)(void *), void *argument) {
  void **top = (void **)end - 20;  // x19, x20, ..., x30
  top[0] = (void *)function, top[1] = argument, top[11] = (void *)begin;
  return top;
}
#endif

struct Thread {
  void *stack;    // where it ends while the thread does not run
  u8 *limit;      // below it are the stacks of others
  u32 line;       // of the barrier that the thread waits at
  u32 turn;       // of two places to exchange operands in
  bool in_warp;   // it waits for its warp, not for the block
  bool done;
  Context *context;
  const void *kernel;
  dim3 place, block;
};
constexpr u64 EXCHANGE_BYTES = 64 << 10, STACK_BYTES = 248 << 10, MOST_THREADS = 1024;  // of a block

__attribute__((noinline)) static void wait(Context *c, u32 line, bool in_warp) {
  Thread *t = c->running;
  t->line = line, t->in_warp = in_warp;
  if ((u8 *)__builtin_frame_address(0) < t->limit) fault(c, NO_ROOM, t->limit - (u8 *)__builtin_frame_address(0));
  go_on(&t->stack, c->launcher);
}
#define __syncthreads() wait(context, __LINE__, false)

template <class Kernel> static void run_thread(void *thread) {
  Thread *t = (Thread *)thread;
  (*(const Kernel *)t->kernel)(t->place, t->block);
  t->done = true;
  go_on(&t->stack, t->context->launcher);
}

// mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32: the warp's threads hold a 16x16 and a 16x8 matrix in parts (the
// PTX manual's "Matrix Fragments for mma.m16n8k16"). All leave their parts, and when all have, each takes what it needs.
struct Operands { half a[8], b[4]; };
template <class A, class B, class C> INLINE C mma(Context *c, dim3 t, u32 line, A a, B b, C sum) {
  u32 id = t.x + c->block.x * (t.y + c->block.y * t.z);
  Operands *all = (Operands *)c->heap + 1024 * (c->running->turn ^= 1);
  for (int i = 0; i < 8; i++) all[id].a[i] = ((half *)&a)[i];
  for (int i = 0; i < 4; i++) all[id].b[i] = ((half *)&b)[i];
  wait(c, line, true);
  Operands *warp = all + (id & ~31u);
  u32 group = id % 32 / 4, part = id % 4;
  for (u32 e = 0; e < 4; e++) {
    u32 row = group + 8 * (e / 2), column = 2 * part + e % 2;
    float x = 0;
    for (u32 k = 0; k < 16; k++)
      x += (float)warp[row % 8 * 4 + k % 8 / 2].a[k % 2 + 2 * (row / 8) + 4 * (k / 8)] *
           (float)warp[column * 4 + k % 8 / 2].b[k % 2 + 2 * (k / 8)];
    ((float *)&sum)[e] += x;
  }
  return sum;
}

// wgmma.mma_async.sync.aligned.m64nNk16.f32.f16.f16 with the left operand in registers: a warp's 16 rows, which are spread
// as those of mma.m16n8k16. The right operand is in shared memory at `right`, in rows of 128 bytes for each column, whose
// 16 bytes are swizzled by the address; `description` says how far the next eight columns are (PTX's "Matrix Descriptor
// Format" and "Swizzling Modes").
INLINE void group_mma(Context *c, dim3 t, u32 line, float **sums, u32 n, u32 *left, local<half> right, u64 description) {
  u32 id = t.x + c->block.x * (t.y + c->block.y * t.z), group = id % 32 / 4, part = id % 4;
  u64 stride = (description >> 32 & 0x3FFF) << 4;
  if (description >> 62 != 1) return (void)fault(c, MISALIGNED, description);
  Operands *all = (Operands *)c->heap + 1024 * (c->running->turn ^= 1);
  for (int i = 0; i < 8; i++) all[id].a[i] = ((half *)left)[i];
  wait(c, line, true);
  Operands *warp = all + (id & ~31u);
  for (u32 e = 0; e < n; e++) {
    u32 row = group + 8 * (e % 4 / 2), column = e / 4 * 8 + 2 * part + e % 2;
    float x = 0;
    for (u32 k = 0; k < 16; k++) {
      u64 at = right.offset + column / 8 * stride + column % 8 * 128 + k * 2;
      x += (float)warp[row % 8 * 4 + k % 8 / 2].a[k % 2 + 2 * (row / 8) + 4 * (k / 8)] *
           (float)*(half *)at_shared(c, at ^ (at >> 7 & 7) << 4, 2);
    }
    *sums[e] += x;
  }
}

// The same with the left operand in shared memory too, in rows of 128 bytes for each of 64 rows, of which a warp has 16.
INLINE void group_mma_shared(Context *c, dim3 t, float **sums, u32 n, local<half> left, local<half> right, u64 description) {
  u32 id = t.x + c->block.x * (t.y + c->block.y * t.z), group = id % 32 / 4, part = id % 4, warp = id / 32 % 4;
  u64 stride = (description >> 32 & 0x3FFF) << 4;
  if (description >> 62 != 1) return (void)fault(c, MISALIGNED, description);
  auto element = [&](u64 first, u32 line, u32 k) {
    u64 at = first + line / 8 * stride + line % 8 * 128 + k * 2;
    return (float)*(half *)at_shared(c, at ^ (at >> 7 & 7) << 4, 2);
  };
  for (u32 e = 0; e < n; e++) {
    u32 row = warp * 16 + group + 8 * (e % 4 / 2), column = e / 4 * 8 + 2 * part + e % 2;
    float x = 0;
    for (u32 k = 0; k < 16; k++) x += element(left.offset, row, k) * element(right.offset, column, k);
    *sums[e] += x;
  }
}

// cp.async.bulk.tensor of a descriptor of the tests: an address, bytes of a row, rows, and rows of a tile of 128 bytes,
// swizzled; with pairs of rows, the first ones of eight pairs come before the second ones. It is made at once.
INLINE void copy_tile(Context *c, local<half> to, global<u32> map, u32 column, u32 row, bool ok, bool in_pairs) {
  if (!ok) return;
  if (to.offset % 1024) return (void)fault(c, MISALIGNED, to.offset);
  u64 address = *(map + 0) | (u64)*(map + 1) << 32, pitch = *(map + 2);
  u32 rows = *(map + 3), lines = *(map + 4);
  for (u32 line = 0; line < lines; line++) {
    u32 from = in_pairs ? (row + line / 16) * 16 + line % 8 * 2 + line % 16 / 8 : row + line;
    for (u32 chunk = 0; chunk < 8; chunk++) {
      void *place = at_shared(c, to.offset + line * 128 + (chunk ^ line % 8) * 16, 16);
      if (from < rows) memcpy(place, at_global(c, address + from * pitch + column * 2 + chunk * 16, 16), 16);
      else memset(place, 0, 16);
    }
  }
}

template <class Start> INLINE void for_blocks(Context *c, Start block) {
  for (u32 z = 0; z < c->grid.z; z++)
    for (u32 y = 0; y < c->grid.y; y++)
      for (u32 x = 0; x < c->grid.x && !c->fault; x++) block(dim3{x, y, z});
}
template <class Kernel> INLINE void launch_without_barriers(Context *c, Kernel kernel) {
  for_blocks(c, [&](dim3 block) {
    for (u32 z = 0; z < c->block.z; z++)
      for (u32 y = 0; y < c->block.y; y++)
        for (u32 x = 0; x < c->block.x; x++) kernel(dim3{x, y, z}, block);
  });
}
template <class Kernel> INLINE void launch(Context *c, Kernel kernel) {
  u32 n = c->block.x * c->block.y * c->block.z;
  Thread *threads = (Thread *)(c->heap + EXCHANGE_BYTES);
  u8 *stacks = (u8 *)(threads + MOST_THREADS) + STACK_BYTES;  // one more, so that the first may overflow as well
  if (n > MOST_THREADS || stacks + n * STACK_BYTES > c->heap + c->heap_bytes) return (void)fault(c, NO_ROOM, n);
  for_blocks(c, [&](dim3 block) {
    for (u64 i = 0; i < c->shared_bytes; i++) c->shared[i] = 0xA5;  // whatever was there before
    for (u32 i = 0; i < n; i++) {
      Thread *t = threads + i;
      t->limit = stacks + i * STACK_BYTES;
      t->stack = new_stack(t->limit + STACK_BYTES, run_thread<Kernel>, t);
      t->turn = 0, t->done = false, t->context = c, t->kernel = &kernel, t->block = block;
      t->place = {i % c->block.x, i / c->block.x % c->block.y, i / c->block.x / c->block.y};
    }
    u32 warps = (n + 31) / 32;
    for (bool some = true; some && !c->fault;) {
      some = false;
      u32 line = 0;
      for (u32 w = 0; w < warps; w++) {
        u32 warp = c->backwards ? warps - 1 - w : w, size = n - warp * 32 < 32 ? n - warp * 32 : 32;
        for (bool again = true; again && !c->fault;) {
          again = false;
          u32 here = 0;
          for (u32 k = 0; k < size; k++) {
            Thread *t = threads + warp * 32 + (c->backwards ? size - 1 - k : k);
            if (t->done) continue;
            c->running = t;
            go_on(&c->launcher, t->stack);
            if (t->done) continue;
            if (here && t->line != here) fault(c, DIVERGENT, t->line);  // threads of a warp at two barriers
            here = t->line, again = t->in_warp;
          }
          if (!here || again) continue;
          some = true;
          if (line && here != line) fault(c, DIVERGENT, here);  // threads of a block at two barriers
          line = here;
        }
      }
    }
  });
}
