//! The tile registers, and the product of two panels.
//!
//! Rust has no stable functions for these instructions, so they are in inline assembly.

use std::arch::asm;
use std::marker::PhantomData;

use super::layout::{EDGE, TileRow};

/// Bytes between two rows of memory of a tile of a packed factor.
const TILE_STRIDE: usize = size_of::<TileRow>();

/// The operand of `ldtilecfg`.
#[repr(C, align(64))]
struct TileShapes([u8; 64]);

/// Palette 1, and 8 tiles of 16 rows of 64 bytes.
static TILE_SHAPES: TileShapes = {
    let mut bytes = [0; 64];
    bytes[0] = 1;
    let mut tile = 0;
    while tile < 8 {
        bytes[16 + 2 * tile] = TILE_STRIDE as u8;
        bytes[48 + tile] = 16;
        tile += 1;
    }
    TileShapes(bytes)
};

/// The tile registers of this thread, ready for use.
pub(super) struct TileRegisters(PhantomData<*const ()>);

impl TileRegisters {
    /// Prepares the tile registers of this thread. There is one such value on a thread at a time.
    ///
    /// # Safety
    /// This process may use AMX.
    pub unsafe fn new() -> Self {
        let shapes = TILE_SHAPES.0.as_ptr();
        // SAFETY: the process may use the registers, and the 64 bytes are valid shapes.
        unsafe { asm!("ldtilecfg [{}]", in(reg) shapes, options(nostack, readonly)) };
        Self(PhantomData)
    }

    /// `out = left right`, or `out += left right`, for `tiles` tiles of two panels. `out` is a block of
    /// 32 x 32 values: the first one, and the distance of two rows.
    ///
    /// # Safety
    /// `tiles` is above 0, both panels have as many tiles from the pointers on, and `out` has the block.
    #[inline]
    pub(super) unsafe fn multiply(
        &self,
        (left, right): (*const TileRow, *const TileRow),
        tiles: usize,
        (out, stride): (*mut f32, usize),
        adds: bool,
    ) {
        // SAFETY: `self` proves that the registers are configured. The caller guarantees `tiles` pairs
        // of tiles of both factors and the block of the output. Only the registers that are named here
        // change.
        unsafe {
            let lower = out.add(EDGE / 2 * stride);
            asm!(
                // The sums of the four quarters of the block are in tiles 0 to 3.
                "test {adds}, {adds}",
                "jnz 3f",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "jmp 2f",
                "3:",
                "tileloadd tmm0, [{out} + {out_stride}*1]",
                "tileloadd tmm1, [{out} + {out_stride}*1 + 64]",
                "tileloadd tmm2, [{lower} + {out_stride}*1]",
                "tileloadd tmm3, [{lower} + {out_stride}*1 + 64]",
                "2:",
                "tileloadd tmm4, [{left} + {stride}*1]",
                "tileloadd tmm6, [{right} + {stride}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{right} + {stride}*1 + 1024]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{left} + {stride}*1 + 1024]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {left}, 2048",
                "add {right}, 2048",
                "dec {tiles}",
                "jnz 2b",
                "tilestored [{out} + {out_stride}*1], tmm0",
                "tilestored [{out} + {out_stride}*1 + 64], tmm1",
                "tilestored [{lower} + {out_stride}*1], tmm2",
                "tilestored [{lower} + {out_stride}*1 + 64], tmm3",
                adds = in(reg) usize::from(adds),
                left = inout(reg) left => _,
                right = inout(reg) right => _,
                tiles = inout(reg) tiles => _,
                stride = in(reg) TILE_STRIDE,
                out = in(reg) out,
                lower = in(reg) lower,
                out_stride = in(reg) stride * size_of::<f32>(),
                out("tmm0") _,
                out("tmm1") _,
                out("tmm2") _,
                out("tmm3") _,
                out("tmm4") _,
                out("tmm5") _,
                out("tmm6") _,
                out("tmm7") _,
                options(nostack),
            );
        }
    }
}

impl Drop for TileRegisters {
    fn drop(&mut self) {
        // Otherwise Linux would save and restore the tiles whenever it switches threads.
        // SAFETY: `self` proves that the process may use the registers.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}
