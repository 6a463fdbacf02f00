// CUDA C as tinygrad writes it, on a CPU: what a kernel's text is compiled with (see compiler.py). Freestanding: no
// headers, no libraries, no data of its own, so that the code can lie anywhere.
//
// A thread of a block is a coroutine: it runs until a barrier, and goes on when all of its block have come that far.
// Meanwhile a warp goes as far as it can, the first one first or the last: where a barrier is missing between two of
// them, one order at least finds what is not there yet, or is no longer there.
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
  u8 *heap; u64 heap_bytes;                       // for coroutines
  dim3 grid, block;
  Functions functions;
  u64 fault, fault_address, loads_and_stores, backwards;
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
VECTORS(unsigned char, unsigned_char)
VECTORS(signed char, signed_char)
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
INLINE unsigned int __byte_perm(unsigned int low, unsigned int high, unsigned int places) {
  unsigned long long bytes = (unsigned long long)high << 32 | low;
  unsigned int result = 0;
  for (int i = 0; i < 4; i++) result |= (unsigned int)(bytes >> (places >> 4 * i & 7) * 8 & 255) << 8 * i;
  return result;
}

INLINE float __int_as_float(int i) { return __builtin_bit_cast(float, i); }
#define sqrt(x) __builtin_sqrtf(x)
#define trunc(x) __builtin_truncf(x)
INLINE float fmaxf(float a, float b) { return a < b || a != a ? b : a; }
#define exp2(x) context->functions.exp2(x)
#define __nvvm_ex2_approx_ftz_f(x) exp2(x)
#define log2(x) context->functions.log2(x)
#define sin(x) context->functions.sin(x)
#define hsqrt(x) ((half)__builtin_sqrtf((float)(x)))
#define htrunc(x) ((half)__builtin_truncf((float)(x)))
#define hexp2(x) ((half)exp2((float)(x)))
#define hlog2(x) ((half)log2((float)(x)))
#define hsin(x) ((half)sin((float)(x)))
#define hrcp(x) ((half)(1.0f / (float)(x)))

// ---- threads ----

namespace std {  // the names that the language looks up
template <class P = void> struct coroutine_handle;
template <> struct coroutine_handle<void> {
  void *frame;
  static coroutine_handle from_address(void *a) { return {a}; }
  void *address() const { return frame; }
};
template <class P> struct coroutine_handle {
  void *frame;
  static coroutine_handle from_address(void *a) { return {a}; }
  static coroutine_handle from_promise(P &p) { return {__builtin_coro_promise(&p, alignof(P), true)}; }
  operator coroutine_handle<>() const { return {frame}; }
  void *address() const { return frame; }
  P &promise() const { return *(P *)__builtin_coro_promise(frame, alignof(P), false); }
};
template <class R, class... A> struct coroutine_traits { using promise_type = typename R::promise_type; };
struct suspend_always {
  bool await_ready() const noexcept { return false; }
  void await_suspend(coroutine_handle<>) const noexcept {}
  void await_resume() const noexcept {}
};
}  // namespace std

constexpr u64 THREADS_BYTES = 8 << 10, EXCHANGE_BYTES = 64 << 10;  // at the heap's begin

struct Thread {
  struct promise_type {
    u32 line = 0;  // of the barrier that the thread waits at
    bool in_warp;  // it is one of the warp, not of the block
    u32 turn = 0;  // of two places to exchange operands in
    template <class... A> static void *operator new(size_t n, Context *c, A...) noexcept {
      n = (n + 63) & ~63ul;
      if (n + EXCHANGE_BYTES + THREADS_BYTES > c->heap_bytes) return fault(c, NO_ROOM, n), nullptr;
      c->heap_bytes -= n;
      return c->heap + c->heap_bytes;
    }
    static void operator delete(void *, size_t) {}
    static Thread get_return_object_on_allocation_failure() { return {{nullptr}}; }
    Thread get_return_object() { return {std::coroutine_handle<promise_type>::from_promise(*this)}; }
    std::suspend_always initial_suspend() noexcept { return {}; }
    std::suspend_always final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() {}
  };
  std::coroutine_handle<promise_type> handle;
};
struct Barrier {
  u32 line;
  bool await_ready() const noexcept { return false; }
  void await_suspend(std::coroutine_handle<Thread::promise_type> h) const noexcept {
    h.promise().line = line, h.promise().in_warp = false;
  }
  void await_resume() const noexcept {}
};
#define __syncthreads() co_await Barrier { __LINE__ }

// mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32: the warp's threads hold a 16x16 and a 16x8 matrix in parts (the
// PTX manual's "Matrix Fragments for mma.m16n8k16"). All leave their parts, and when all have, each takes what it needs.
struct Operands { half a[8], b[4]; };
template <class A, class B, class C> struct Mma {
  Context *c; u32 id; A a; B b; C sum; u32 line;
  Operands *all;
  bool await_ready() const noexcept { return false; }
  void await_suspend(std::coroutine_handle<Thread::promise_type> h) noexcept {
    h.promise().line = line, h.promise().in_warp = true;
    all = (Operands *)(c->heap + THREADS_BYTES) + 1024 * (h.promise().turn ^= 1);
    for (int i = 0; i < 8; i++) all[id].a[i] = ((half *)&a)[i];
    for (int i = 0; i < 4; i++) all[id].b[i] = ((half *)&b)[i];
  }
  C await_resume() noexcept {
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
};
template <class A, class B, class C> INLINE Mma<A, B, C> mma(Context *c, dim3 t, u32 line, A a, B b, C sum) {
  return {c, t.x + c->block.x * (t.y + c->block.y * t.z), a, b, sum, line, nullptr};
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
  u64 heap_bytes = c->heap_bytes;
  u32 n = c->block.x * c->block.y * c->block.z;
  Thread *threads = (Thread *)c->heap;
  for_blocks(c, [&](dim3 block) {
    for (u64 i = 0; i < c->shared_bytes; i++) c->shared[i] = 0xA5;  // whatever was there before
    c->heap_bytes = heap_bytes;
    for (u32 i = 0; i < n; i++) {
      threads[i] = kernel(dim3{i % c->block.x, i / c->block.x % c->block.y, i / c->block.x / c->block.y}, block);
      if (!threads[i].handle.frame) return;
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
            void *frame = threads[warp * 32 + (c->backwards ? size - 1 - k : k)].handle.frame;
            if (__builtin_coro_done(frame)) continue;
            __builtin_coro_resume(frame);
            if (__builtin_coro_done(frame)) continue;
            auto &now = std::coroutine_handle<Thread::promise_type>{frame}.promise();
            if (here && now.line != here) fault(c, DIVERGENT, now.line);  // threads of a warp at two barriers
            here = now.line, again = now.in_warp;
          }
          if (!here || again) continue;
          some = true;
          if (line && here != line) fault(c, DIVERGENT, here);  // threads of a block at two barriers
          line = here;
        }
      }
    }
  });
  c->heap_bytes = heap_bytes;
}
