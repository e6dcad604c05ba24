//! Comparisons of instruction sets. Functions panic on a difference.

use pulp::Arch;

use super::skip_without;
use crate::simd::{SimdTask, Vectorized};

/// One of the ways to run a [`SimdTask`].
#[derive(Clone, Copy, Debug)]
pub enum Instructions {
    /// Those that every processor of this architecture has. With `fused`, each `mul_add` of the task
    /// calls a function, which is slow but rounds like the instruction.
    Baseline {
        /// The task's parameter `FUSED`.
        fused: bool,
    },
    /// Those that [`dispatch`](crate::simd::dispatch) selects on some processor.
    Vector(Arch),
}

impl Instructions {
    /// Runs a task.
    pub fn run<T: SimdTask>(self, task: T) -> T::Output {
        match self {
            Self::Baseline { fused: false } => task.run::<false>(),
            Self::Baseline { fused: true } => task.run::<true>(),
            Self::Vector(arch) => arch.dispatch(Vectorized(task)),
        }
    }

    /// Whether tasks run with `FUSED`.
    fn is_fused(self) -> bool {
        match self {
            Self::Baseline { fused } => fused,
            Self::Vector(arch) => !matches!(arch, Arch::Scalar),
        }
    }

    /// All that this processor can run. Reports those that it lacks as skipped.
    pub fn all() -> Vec<Self> {
        let mut vectors = vec![Some(Arch::Scalar)];
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = pulp::x86::V3::try_new().map(Arch::V3);
            vectors.push(avx2.or_else(|| lacks("AVX2")));
            let avx512 = pulp::x86::V4::try_new().map(Arch::V4);
            vectors.push(avx512.or_else(|| lacks("AVX-512")));
        }
        #[cfg(target_arch = "aarch64")]
        vectors.push(pulp::aarch64::Neon::try_new().map(Arch::Neon).or_else(|| lacks("NEON")));
        let baseline = [false, true].map(|fused| Self::Baseline { fused });
        baseline.into_iter().chain(vectors.into_iter().flatten().map(Self::Vector)).collect()
    }
}

fn lacks(instructions: &str) -> Option<Arch> {
    skip_without(instructions);
    None
}

/// Asserts that `run`, which ignores `FUSED`, returns the same bits with all instructions.
pub fn assert_same_bits<T: Copy + Into<f64>>(run: impl Fn(Instructions) -> Vec<T>) {
    compare(&Instructions::all(), run);
}

/// Asserts that `run`, which uses `FUSED`, returns the same bits with all instructions that fuse, and
/// the same bits with all that do not.
pub fn assert_same_bits_if_fused<T: Copy + Into<f64>>(run: impl Fn(Instructions) -> Vec<T>) {
    let (fused, others): (Vec<_>, Vec<_>) =
        Instructions::all().into_iter().partition(|instructions| instructions.is_fused());
    compare(&fused, &run);
    compare(&others, run);
}

fn compare<T: Copy + Into<f64>>(all: &[Instructions], run: impl Fn(Instructions) -> Vec<T>) {
    let bits = |instructions: Instructions| -> Vec<u64> {
        // Exact, and of different bits for 0 and -0.
        run(instructions).into_iter().map(|x| Into::<f64>::into(x).to_bits()).collect()
    };
    let expected = bits(all[0]);
    assert!(!expected.is_empty(), "there is nothing to compare");
    for instructions in &all[1..] {
        let found = bits(*instructions);
        let differs = found.iter().zip(&expected).position(|(a, b)| a != b);
        assert_eq!(found.len(), expected.len());
        assert_eq!(differs, None, "{instructions:?} against {:?}", all[0]);
    }
}
