//! The instructions that multiply in bf16 (x86-64 Linux).

use std::arch::x86_64::{__cpuid, CpuidResult};
use std::sync::OnceLock;

use super::amx::{Amx, TileRegisters};
use super::{TileRow, UnpackedRows};
use super::{pack, vectors};

/// The proof that this process may use instructions for bf16, and AVX-512 with bf16 to pack factors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bf16Unit(Bf16Instructions);

#[derive(Clone, Copy, Debug)]
enum Bf16Instructions {
    Amx(Amx),
    /// AVX-512 with bf16.
    Vectors,
}

/// What a thread multiplies with.
pub(super) enum Registers {
    Tiles(TileRegisters),
    Vectors,
}

impl Bf16Unit {
    /// The fastest instructions. `None` if all of them are slower than those for f32.
    pub fn get() -> Option<Self> {
        static UNIT: OnceLock<Option<Bf16Unit>> = OnceLock::new();
        *UNIT.get_or_init(|| {
            let amx = Self::all().find(|unit| matches!(unit.0, Bf16Instructions::Amx(_)));
            // On AMD's Zen 4, `vdpbf16ps` multiplies twice as many values as an instruction for f32 in the
            // same time. On Intel's Sapphire Rapids it multiplies half as many.
            amx.or_else(|| Self::all().next().filter(|_| is_amd()))
        })
    }

    /// Everything that this process may use, slow instructions included.
    pub fn all() -> impl Iterator<Item = Self> {
        let can_pack = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512bf16");
        let amx = if can_pack { Amx::get() } else { None };
        let vectors = can_pack.then_some(Bf16Instructions::Vectors);
        vectors.into_iter().chain(amx.map(Bf16Instructions::Amx)).map(Self)
    }

    /// Whether products are computed with vectors, and not with AMX's tiles.
    pub fn uses_vectors(self) -> bool {
        matches!(self.0, Bf16Instructions::Vectors)
    }

    /// Prepares this thread's registers. There is one such value on a thread at a time.
    pub(super) fn registers(self) -> Registers {
        match self.0 {
            Bf16Instructions::Amx(amx) => Registers::Tiles(amx.registers()),
            Bf16Instructions::Vectors => Registers::Vectors,
        }
    }

    /// Packs `rows` (32 or fewer) of `columns` values of the left factor as a panel. `from` is the first
    /// value, and the distance of two rows.
    ///
    /// # Safety
    /// `from` has these rows. `to` has 32 rows of memory for each 32 columns, or fewer at the end.
    pub(super) unsafe fn pack_rows(
        self,
        (from, stride): (*const f32, usize),
        (rows, columns): (usize, usize),
        to: *mut TileRow,
    ) {
        // SAFETY: the processor has the instructions, and the caller guarantees the rest.
        unsafe { pack::rows(from, stride, (rows, columns), to) };
    }

    /// Packs `rows` (32 or fewer) of `columns` values as columns of the right factor, which are a panel.
    ///
    /// # Safety
    /// As [`Self::pack_rows`].
    pub(super) unsafe fn pack_transposed(
        self,
        from: UnpackedRows<'_>,
        shape: (usize, usize),
        to: *mut TileRow,
    ) {
        // SAFETY: the processor has the instructions, and the caller guarantees the rest.
        unsafe {
            match from {
                UnpackedRows::F32(values) => pack::transposed(values.as_ptr(), shape, to),
                UnpackedRows::Bf16(values) => pack::transposed(values.as_ptr(), shape, to),
            }
        }
    }

    /// Packs `rows` (32 or fewer) of `columns` values as inner values of the right factor: two tiles of
    /// each panel. The panels start `step` rows of memory apart.
    ///
    /// # Safety
    /// `from` has these rows. `to` is the first of 32 rows of memory in the first panel, and the other
    /// panels have the same.
    pub(super) unsafe fn pack_pairs(
        self,
        from: UnpackedRows<'_>,
        shape: (usize, usize),
        to: *mut TileRow,
        step: usize,
    ) {
        // SAFETY: the processor has the instructions, and the caller guarantees the rest.
        unsafe {
            match from {
                UnpackedRows::F32(values) => pack::pairs(values.as_ptr(), shape, to, step),
                UnpackedRows::Bf16(values) => pack::pairs(values.as_ptr(), shape, to, step),
            }
        }
    }
}

impl Registers {
    /// `out = left right`, or `out += left right`, for `tiles` tiles of two panels. `out` is a block of
    /// 32 x 32 values: the first one, and the distance of two rows.
    ///
    /// # Safety
    /// `tiles` is above 0, both panels have as many tiles from the pointers on, and `out` has the block.
    #[inline]
    pub(super) unsafe fn multiply(
        &self,
        panels: (*const TileRow, *const TileRow),
        tiles: usize,
        out: (*mut f32, usize),
        adds: bool,
    ) {
        // SAFETY: `self` proves that the processor has the instructions, and the caller guarantees the
        // rest.
        unsafe {
            match self {
                Self::Tiles(registers) => registers.multiply(panels, tiles, out, adds),
                Self::Vectors => vectors::multiply(panels, tiles, out, adds),
            }
        }
    }
}

fn is_amd() -> bool {
    // The function is unsafe in some versions of Rust and safe in others.
    let cpuid: unsafe fn(u32) -> CpuidResult = __cpuid;
    // SAFETY: every x86-64 processor has this instruction and leaf 0.
    let vendor = unsafe { cpuid(0) };
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).as_flattened() == b"AuthenticAMD"
}
