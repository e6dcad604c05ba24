//! Permission to use the tile registers, and the product of two panels (x86-64 Linux).
//!
//! Rust has no stable functions for these instructions, so they are in inline assembly.

use std::arch::asm;
use std::arch::x86_64::{__cpuid_count, CpuidResult};
use std::marker::PhantomData;
use std::sync::OnceLock;

use super::{EDGE, TileRow};

/// Bytes between two rows of memory of a tile of a packed factor.
const TILE_STRIDE: usize = size_of::<TileRow>();

/// The proof that this process may use AMX with bf16.
#[derive(Clone, Copy, Debug)]
pub(super) struct Amx(());

impl Amx {
    /// `None` if the processor, which has AVX-512, does not have the instructions, or Linux does not permit
    /// them. The first call asks Linux for the permission, which applies to all threads.
    pub fn get() -> Option<Self> {
        static PERMITTED: OnceLock<bool> = OnceLock::new();
        let permitted = PERMITTED.get_or_init(|| has_instructions() && request_permission());
        permitted.then_some(Self(()))
    }

    /// Prepares the tile registers of this thread. There is one such value on a thread at a time.
    pub(super) fn registers(self) -> TileRegisters {
        let shapes = TILE_SHAPES.0.as_ptr();
        // SAFETY: the process may use the registers, and the 64 bytes are valid shapes.
        unsafe { asm!("ldtilecfg [{}]", in(reg) shapes, options(nostack, readonly)) };
        TileRegisters(PhantomData)
    }
}

/// Whether the processor has AMX with bf16. It has AVX-512.
fn has_instructions() -> bool {
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    // The function is unsafe in some versions of Rust and safe in others.
    let cpuid: unsafe fn(u32, u32) -> CpuidResult = __cpuid_count;
    // SAFETY: every processor with AVX-512 has this instruction and leaf 7.
    let features = unsafe { cpuid(7, 0) }.edx;
    features & (AMX_BF16 | AMX_TILE) == AMX_BF16 | AMX_TILE
}

/// Asks Linux for the tile registers, which enlarge the saved state of each thread by 8 KiB. False if
/// the system does not know them or refuses.
fn request_permission() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILE_DATA: libc::c_long = 18;
    // SAFETY: the call takes two numbers and uses no memory of this process.
    let failed =
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA) };
    failed == 0
}

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
