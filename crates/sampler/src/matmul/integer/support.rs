//! The instructions that multiply integers.

#[cfg(target_arch = "x86_64")]
use pulp::Arch;

/// How products of integers are computed. The bits are those of [`Self::Portable`] with `fused`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IntegerInstructions {
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

    /// The fastest ones of this processor.
    pub fn fastest() -> Self {
        #[cfg(target_arch = "x86_64")]
        for instructions in [Self::Avx512Vnni, Self::AvxVnni, Self::Avx2] {
            if instructions.is_available() {
                return instructions;
            }
        }
        Self::PORTABLE
    }

    /// Whether this processor has them.
    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let has_avx2 = || {
                matches!(Arch::new(), Arch::V3(_) | Arch::V4(_)) && is_x86_feature_detected!("f16c")
            };
            match self {
                Self::Avx512Vnni => {
                    matches!(Arch::new(), Arch::V4(_)) && is_x86_feature_detected!("avx512vnni")
                }
                Self::AvxVnni => has_avx2() && is_x86_feature_detected!("avxvnni"),
                Self::Avx2 => has_avx2(),
                Self::Portable { .. } => true,
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        true
    }

    /// Whether activations are stored as bytes, and not as integers of 16 bits.
    pub fn use_bytes(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            self == Self::Avx512Vnni
        }
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

impl Default for IntegerInstructions {
    fn default() -> Self {
        Self::fastest()
    }
}
