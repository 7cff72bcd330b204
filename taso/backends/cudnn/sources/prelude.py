"""What every kernel's text begins with: element types, conversions, arithmetic as ONNX has it, reductions.

There is no header in it: NVRTC needs none, and whoever runs taso has no CUDA toolkit. Float16 and bfloat16 are held as
their bits and computed in float32. What only a GPU knows (the conversion of halves, shuffles) is behind a few names,
so that a host compiler given the same names runs the same text.
"""

PRELUDE = r"""
typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
struct f16 { u16 bits; };
struct bf16 { u16 bits; };

#define DEVICE static __device__ __forceinline__
#define UNROLL _Pragma("unroll")

// ── conversions ──

#ifdef __CUDA_ARCH__
DEVICE float half_value(u16 h) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(h)); return y; }
DEVICE u16 half_bits(float x) { u16 h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x)); return h; }
#endif

template <typename T> DEVICE T widen(T x) { return x; }
DEVICE float widen(f16 x) { return half_value(x.bits); }
DEVICE float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

// rounded so that rounding again to fewer bits is rounding once: the last bit is odd where anything was cut off
DEVICE float rounded_to_odd(double x) {
    float y = (float)x;
    if ((double)y == x || x != x) return y;
    u32 bits = __float_as_uint(y);
    if ((x < 0 ? -(double)y : (double)y) > (x < 0 ? -x : x)) bits -= 1;
    return __uint_as_float(bits | 1);
}
DEVICE float single(float x) { return x; }
DEVICE float single(double x) { return rounded_to_odd(x); }
template <typename T> DEVICE float single(T x) { return (float)x; }

DEVICE u16 brain_bits(float x) {
    const u32 bits = __float_as_uint(x);
    return x != x ? (u16)0x7fc0 : (u16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Narrow<T>::of rounds to an element of type T; integers that do not hold a number keep its low bits, as C does
template <typename T> struct Narrow {
    template <typename S> DEVICE T of(S x) { return (T)x; }
    DEVICE T of(float x) { return (T)(i64)x; }
    DEVICE T of(double x) { return (T)(i64)x; }
};
template <> struct Narrow<float> { template <typename S> DEVICE float of(S x) { return (float)x; } };
template <> struct Narrow<double> { template <typename S> DEVICE double of(S x) { return (double)x; } };
template <> struct Narrow<bool> { template <typename S> DEVICE bool of(S x) { return x != (S)0; } };
template <> struct Narrow<i32> {
    template <typename S> DEVICE i32 of(S x) { return (i32)x; }
};
template <> struct Narrow<u64> {
    template <typename S> DEVICE u64 of(S x) { return (u64)x; }
    DEVICE u64 of(float x) { return x < 0 ? (u64)(i64)x : (u64)x; }
    DEVICE u64 of(double x) { return x < 0 ? (u64)(i64)x : (u64)x; }
};
template <> struct Narrow<f16> {
    template <typename S> DEVICE f16 of(S x) { f16 y; y.bits = half_bits(single(x)); return y; }
};
template <> struct Narrow<bf16> {
    template <typename S> DEVICE bf16 of(S x) { bf16 y; y.bits = brain_bits(single(x)); return y; }
};
template <typename T, typename S> DEVICE T narrow(S x) { return Narrow<T>::of(x); }

// ── memory: V elements at once where they lie side by side ──

template <typename T, int V> struct alignas(sizeof(T) * V) Pack { T at[V]; };

template <int V, typename T> DEVICE void load(const T* p, T (&a)[V]) {
    const Pack<T, V> pack = *reinterpret_cast<const Pack<T, V>*>(p);
    UNROLL for (int k = 0; k < V; ++k) a[k] = pack.at[k];
}
template <int V, typename T> DEVICE void store(T* p, const T (&a)[V]) {
    Pack<T, V> pack;
    UNROLL for (int k = 0; k < V; ++k) pack.at[k] = a[k];
    *reinterpret_cast<Pack<T, V>*>(p) = pack;
}
template <int V, typename T> DEVICE void strided(const T* p, i64 step, T (&a)[V]) {
    UNROLL for (int k = 0; k < V; ++k) a[k] = p[k * step];
}
template <int V, typename T> DEVICE void scattered(T* p, i64 step, const T (&a)[V]) {
    UNROLL for (int k = 0; k < V; ++k) p[k * step] = a[k];
}
template <int V, typename T> DEVICE void repeated(T x, T (&a)[V]) {
    UNROLL for (int k = 0; k < V; ++k) a[k] = x;
}
template <int V, typename T> DEVICE bool aligned(const T* p) {
    return reinterpret_cast<u64>(p) % (sizeof(T) * V) == 0;
}

// ── arithmetic: integers wrap, NaN goes through max and min ──

#define OF_FLOATS(T, f, g) \
    DEVICE T add(T a, T b) { return a + b; } \
    DEVICE T sub(T a, T b) { return a - b; } \
    DEVICE T mul(T a, T b) { return a * b; } \
    DEVICE T negated(T a) { return -a; } \
    DEVICE T quotient(T a, T b) { return a / b; } \
    DEVICE T size_of(T a) { return f##abs##g(a); } \
    DEVICE T sign_of(T a) { return a > 0 ? (T)1 : a < 0 ? (T)-1 : a; } \
    DEVICE T remainder_of(T a, T b) { return f##mod##g(a, b); } \
    DEVICE T modulo(T a, T b) { \
        const T r = remainder_of(a, b); \
        if (r == 0 && b != 0) return b < 0 ? -(T)0 : (T)0; \
        return r != 0 && (r < 0) != (b < 0) ? r + b : r; \
    } \
    DEVICE bool is_nan(T a) { return a != a; }
OF_FLOATS(float, f, f)
OF_FLOATS(double, f, )

#define OF_FUNCTION(name, one, two) \
    DEVICE float name(float x) { return one(x); } \
    DEVICE double name(double x) { return two(x); }
OF_FUNCTION(exp_of, expf, exp)
OF_FUNCTION(expm1_of, expm1f, expm1)
OF_FUNCTION(log_of, logf, log)
OF_FUNCTION(log1p_of, log1pf, log1p)
OF_FUNCTION(sqrt_of, sqrtf, sqrt)
OF_FUNCTION(erf_of, erff, erf)
OF_FUNCTION(floor_of, floorf, floor)
OF_FUNCTION(ceil_of, ceilf, ceil)
OF_FUNCTION(round_of, rintf, rint)
OF_FUNCTION(sin_of, sinf, sin)
OF_FUNCTION(cos_of, cosf, cos)
OF_FUNCTION(tan_of, tanf, tan)
OF_FUNCTION(asin_of, asinf, asin)
OF_FUNCTION(acos_of, acosf, acos)
OF_FUNCTION(atan_of, atanf, atan)
OF_FUNCTION(sinh_of, sinhf, sinh)
OF_FUNCTION(cosh_of, coshf, cosh)
OF_FUNCTION(tanh_of, tanhf, tanh)
OF_FUNCTION(asinh_of, asinhf, asinh)
OF_FUNCTION(acosh_of, acoshf, acosh)
OF_FUNCTION(atanh_of, atanhf, atanh)
DEVICE float power(float x, float y) { return powf(x, y); }
DEVICE double power(double x, double y) { return pow(x, y); }

// U is an unsigned type in which nothing overflows
#define OF_INTEGERS(T, U) \
    DEVICE T add(T a, T b) { return (T)((U)a + (U)b); } \
    DEVICE T sub(T a, T b) { return (T)((U)a - (U)b); } \
    DEVICE T mul(T a, T b) { return (T)((U)a * (U)b); } \
    DEVICE T negated(T a) { return (T)(0 - (U)a); } \
    DEVICE T size_of(T a) { return a < (T)0 ? negated(a) : a; } \
    DEVICE T sign_of(T a) { return (T)((a > (T)0) - (a < (T)0)); } \
    DEVICE T quotient(T a, T b) { return b == (T)0 ? (T)0 : b == (T)-1 && (T)-1 < (T)0 ? negated(a) : (T)(a / b); } \
    DEVICE T remainder_of(T a, T b) { \
        return b == (T)0 || (b == (T)-1 && (T)-1 < (T)0) ? (T)0 : (T)(a % b); \
    } \
    DEVICE T modulo(T a, T b) { \
        const T r = remainder_of(a, b); \
        return r != (T)0 && (r < (T)0) != (b < (T)0) ? add(r, b) : r; \
    } \
    DEVICE T shifted_left(T a, T b) { return (u64)b >= sizeof(T) * 8 ? (T)0 : (T)((U)a << b); } \
    DEVICE T shifted_right(T a, T b) { return (u64)b >= sizeof(T) * 8 ? (T)(a < (T)0 ? -1 : 0) : (T)(a >> b); } \
    DEVICE bool is_nan(T a) { return false; }
OF_INTEGERS(i8, u32)
OF_INTEGERS(u8, u32)
OF_INTEGERS(i16, u32)
OF_INTEGERS(u16, u32)
OF_INTEGERS(i32, u32)
OF_INTEGERS(u32, u32)
OF_INTEGERS(i64, u64)
OF_INTEGERS(u64, u64)
DEVICE bool is_nan(bool a) { return false; }

template <typename T> DEVICE T most(T a, T b) { return a > b || is_nan(a) ? a : b; }
template <typename T> DEVICE T least(T a, T b) { return a < b || is_nan(a) ? a : b; }

template <typename T, typename S> DEVICE T whole_power(T base, S exponent) {
    if (exponent < (S)0) return base == (T)1 ? (T)1 : base == (T)-1 ? (exponent % 2 == 0 ? (T)1 : (T)-1) : (T)0;
    T result = (T)1;
    for (S left = exponent; left > (S)0; left = (S)(left / 2)) {
        if (left % 2 != (S)0) result = mul(result, base);
        base = mul(base, base);
    }
    return result;
}
template <typename T> DEVICE T sigmoid(T x) { return (T)1 / ((T)1 + exp_of(-x)); }
template <typename T> DEVICE T softplus(T x) { return most(x, (T)0) + log1p_of(exp_of(-size_of(x))); }
template <typename T> DEVICE T saturated(T x, T low, T high) { return x < low ? low : x > high ? high : x; }

// the place that an index names, −1 where it is outside
template <typename T> DEVICE i64 place_of(T index, i64 size) {
    const i64 i = (i64)index < 0 ? (i64)index + size : (i64)index;
    return i >= 0 && i < size ? i : -1;
}

// places outside 0 … n − 1: the nearest one, or as if the data went on mirrored (its ends once), or over again
template <typename T> DEVICE T clamped(T i, T n) { return i < 0 ? 0 : i < n ? i : n - 1; }
template <typename T> DEVICE T wrapped(T i, T n) { return (i % n + n) % n; }
template <typename T> DEVICE T mirrored(T i, T n) {
    if (n == 1) return 0;
    const T m = wrapped(i, 2 * n - 2);
    return m < n ? m : 2 * n - 2 - m;
}

// ── reductions: among G neighbouring lanes, all N threads of a block, or Y rows of X threads ──

struct Add { template <typename T> DEVICE T join(T a, T b) { return add(a, b); } };
struct Mul { template <typename T> DEVICE T join(T a, T b) { return mul(a, b); } };
struct Most { template <typename T> DEVICE T join(T a, T b) { return most(a, b); } };
struct Least { template <typename T> DEVICE T join(T a, T b) { return least(a, b); } };

// a value and where it stands; NaN beats all else, and of equals the first (or the last) one wins
template <typename T> struct Found { T value; i64 place; };
template <bool LARGEST, bool FIRST> struct Extreme {
    template <typename T> DEVICE Found<T> join(Found<T> a, Found<T> b) {
        const bool na = is_nan(a.value), nb = is_nan(b.value);
        const bool before = FIRST ? a.place < b.place : a.place > b.place;
        if (a.place < 0 || b.place < 0) return b.place < 0 ? a : b;
        if (na || nb) return na && nb ? (before ? a : b) : na ? a : b;
        if (a.value == b.value) return before ? a : b;
        return (a.value > b.value) == LARGEST ? a : b;
    }
};

#define WHOLE_WARP 0xffffffffu
template <typename T> DEVICE T from_lane(T x, int mask) { return __shfl_xor_sync(WHOLE_WARP, x, mask); }
template <typename T> DEVICE Found<T> from_lane(Found<T> x, int mask) {
    Found<T> y;
    y.value = from_lane(x.value, mask);
    y.place = from_lane(x.place, mask);
    return y;
}

template <int G, typename Op, typename T> DEVICE T joined_in_group(T x) {
    UNROLL for (int mask = G / 2; mask > 0; mask /= 2) x = Op::join(x, from_lane(x, mask));
    return x;
}
template <int N, typename Op, typename T> DEVICE T joined_in_block(T x) {
    __shared__ T part[N / 32];
    x = joined_in_group<32, Op>(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    T all = part[0];
    for (int w = 1; w < N / 32; ++w) all = Op::join(all, part[w]);
    return all;
}
template <int X, int Y, typename Op, typename T> DEVICE T joined_in_column(T x) {
    if (Y == 1) return x;
    __shared__ T part[Y * X];
    __syncthreads();
    part[threadIdx.x] = x;
    __syncthreads();
    T all = part[threadIdx.x % X];
    for (int y = 1; y < Y; ++y) all = Op::join(all, part[y * X + threadIdx.x % X]);
    return all;
}

// each lane's value joined with those of all lanes before it
template <typename Op, typename T> DEVICE T scanned_in_warp(T x) {
    const int lane = threadIdx.x % 32;
    UNROLL for (int by = 1; by < 32; by *= 2) {
        const T before = __shfl_up_sync(WHOLE_WARP, x, by);
        if (lane >= by) x = Op::join(before, x);
    }
    return x;
}
"""
