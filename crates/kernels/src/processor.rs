//! What the processor has: the choice of instructions for every kernel, and hints to its caches.
//!
//! A loop that the compiler vectorizes is compiled for each instruction set by [`hone_core::simd`]. The kernels of this
//! crate are written for some of these sets, with a portable one for other processors.

#[cfg(target_arch = "x86_64")]
use std::{arch::x86_64::__cpuid, arch::x86_64::__cpuid_count, arch::x86_64::CpuidResult};

#[cfg(target_arch = "x86_64")]
use std::sync::OnceLock;

#[cfg(target_arch = "x86_64")]
use pulp::{Arch, x86::V4};

/// The proof that the processor has AVX-512 (F, BW, CD, DQ and VL) and what precedes it, such as AVX2 and FMA; `None`
/// without it.
#[cfg(target_arch = "x86_64")]
#[inline]
pub fn avx512() -> Option<V4> {
    match Arch::new() {
        Arch::V4(proof) => Some(proof),
        _ => None,
    }
}

/// How products of integers are computed. The bits are those of [`Self::Portable`] with `fused`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IntegerInstructions {
    /// AVX-512 with VNNI: products of bytes, 64 at a time.
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    /// AVX2 with AVX-VNNI: products of 16 bits, 16 at a time, which are added at once.
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    /// AVX2: products of 16 bits, 16 at a time.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// Those that the compiler selects for any processor of this architecture.
    Portable {
        /// Whether `f32::mul_add` is one instruction, or else two operations.
        fused: bool,
    },
}

impl IntegerInstructions {
    /// Those that every processor of this architecture has. NEON has a fused multiply-add; SSE2 does not.
    pub const PORTABLE: Self = Self::Portable { fused: cfg!(target_arch = "aarch64") };

    /// Whether this processor has them.
    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let has_avx2 = || {
                matches!(Arch::new(), Arch::V3(_) | Arch::V4(_)) && is_x86_feature_detected!("f16c")
            };
            match self {
                Self::Avx512Vnni => avx512().is_some() && is_x86_feature_detected!("avx512vnni"),
                Self::AvxVnni => has_avx2() && is_x86_feature_detected!("avxvnni"),
                Self::Avx2 => has_avx2(),
                Self::Portable { .. } => true,
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        true
    }

    /// Whether activations are stored as bytes, and not as integers of 16 bits.
    pub(crate) fn use_bytes(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self == Self::Avx512Vnni;
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// All that give the same bits and that this processor can run. Reports those that it lacks as skipped.
    #[cfg(test)]
    pub fn all() -> Vec<Self> {
        let mut all = vec![Self::Portable { fused: true }];
        #[cfg(target_arch = "x86_64")]
        for (instructions, name) in [
            (Self::Avx2, "AVX2"),
            (Self::AvxVnni, "AVX-VNNI"),
            (Self::Avx512Vnni, "AVX-512 with VNNI"),
        ] {
            if instructions.is_available() {
                all.push(instructions);
            } else {
                hone_core::testing::skip_without(name);
            }
        }
        all
    }
}

/// The fastest ones of this processor.
impl Default for IntegerInstructions {
    fn default() -> Self {
        #[cfg(target_arch = "x86_64")]
        for instructions in [Self::Avx512Vnni, Self::AvxVnni, Self::Avx2] {
            if instructions.is_available() {
                return instructions;
            }
        }
        Self::PORTABLE
    }
}

/// The proof that this process may multiply in bf16 by some instructions, and pack factors with AVX-512 with bf16.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, Debug)]
pub struct Bf16Unit {
    is_amx: bool,
}

#[cfg(target_arch = "x86_64")]
impl Bf16Unit {
    /// The fastest instructions. `None` if all of them are slower than those for f32.
    pub fn get() -> Option<Self> {
        static UNIT: OnceLock<Option<Bf16Unit>> = OnceLock::new();
        *UNIT.get_or_init(|| {
            // On AMD's Zen 4, `vdpbf16ps` multiplies twice as many values as an instruction for f32 in the
            // same time. On Intel's Sapphire Rapids it multiplies half as many.
            Self::all().find(|unit| unit.is_amx).or_else(|| Self::all().next().filter(|_| is_amd()))
        })
    }

    /// Everything that this process may use, slow instructions included.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        let can_pack = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512bf16");
        let has_unit = move |is_amx: &bool| can_pack && (!is_amx || may_use_amx());
        [false, true].into_iter().filter(has_unit).map(|is_amx| Self { is_amx })
    }

    /// Whether products are computed with AMX's tiles, and not with vectors.
    pub(crate) fn is_amx(self) -> bool {
        self.is_amx
    }
}

/// Whether products in bf16 are fastest with the vectors of AVX-512, for kernels that do not use AMX.
pub fn has_fast_bf16_vectors() -> bool {
    #[cfg(target_arch = "x86_64")]
    return Bf16Unit::get().is_some_and(|unit| !unit.is_amx);
    #[cfg(not(target_arch = "x86_64"))]
    false
}

#[cfg(target_arch = "x86_64")]
fn is_amd() -> bool {
    // The function is unsafe in some versions of Rust and safe in others.
    let cpuid: unsafe fn(u32) -> CpuidResult = __cpuid;
    // SAFETY: every x86-64 processor has this instruction and leaf 0.
    let vendor = unsafe { cpuid(0) };
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).as_flattened() == b"AuthenticAMD"
}

/// Whether the processor, which has AVX-512, has AMX with bf16, and Linux permits it. The first call asks for the
/// permission, which applies to all threads and enlarges the saved state of each by 8 KiB.
#[cfg(target_arch = "x86_64")]
fn may_use_amx() -> bool {
    static PERMITTED: OnceLock<bool> = OnceLock::new();
    *PERMITTED.get_or_init(|| {
        const AMX_BF16_AND_TILES: u32 = 1 << 22 | 1 << 24;
        // The function is unsafe in some versions of Rust and safe in others.
        let cpuid: unsafe fn(u32, u32) -> CpuidResult = __cpuid_count;
        // SAFETY: every processor with AVX-512 has this instruction and leaf 7.
        let features = unsafe { cpuid(7, 0) }.edx;
        features & AMX_BF16_AND_TILES == AMX_BF16_AND_TILES && request_tiles()
    })
}

/// Asks Linux for the tile registers. False if the system does not know them or refuses.
#[cfg(target_arch = "x86_64")]
fn request_tiles() -> bool {
    #[cfg(target_os = "linux")]
    {
        const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
        const XFEATURE_XTILE_DATA: libc::c_long = 18;
        // SAFETY: the call takes two numbers and uses no memory of this process.
        let failed = unsafe {
            libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA)
        };
        failed == 0
    }
    #[cfg(not(target_os = "linux"))]
    false
}

/// Values of f32 in a cache line.
pub const CACHE_LINE: usize = 16;

/// Starts to load the cache line at this address, which may be any, into the second-level cache.
#[inline(always)]
pub fn prefetch<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a prefetch is a hint that neither reads memory nor faults, for any address; every
        // x86-64 processor has it (SSE).
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
