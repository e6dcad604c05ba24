//! Products of matrices by cuBLASLt.
//!
//! Matrices are stored by rows here, and by columns there: the library sees each of them transposed, and computes
//! `out^T = b^T a^T`.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use cudarc::cublaslt::{result as lt, sys};
use cudarc::driver::CudaStream;

use crate::arena::ArenaRegion;
use crate::device::Gpu;
use crate::error::{GpuError, Result, call};
use crate::kernels::DeviceFloat;

/// Prepared products at once. A training pass has about 50, but each number of tokens has its own.
const MOST_PREPARED: usize = 1 << 10;

/// Alignment that all algorithms are content with, in bytes.
const WHOLE_ALIGNMENT: u64 = 16;

/// A matrix on the device, stored by rows.
#[derive(Clone, Copy, Debug)]
pub struct DeviceMatrix {
    /// Address of the first value.
    pub address: u64,
    /// Rows and columns in memory.
    pub shape: [usize; 2],
    /// Values from the start of a row to that of the next.
    pub stride: usize,
    /// The type of the values.
    pub float: DeviceFloat,
    /// Whether the matrix is the transpose of what is in memory.
    pub is_transposed: bool,
}

impl DeviceMatrix {
    /// A matrix whose rows follow one another.
    pub fn new(address: u64, shape: [usize; 2], float: DeviceFloat) -> Self {
        Self { address, shape, stride: shape[1], float, is_transposed: false }
    }

    /// The transpose.
    pub fn t(self) -> Self {
        Self { is_transposed: !self.is_transposed, ..self }
    }

    /// `count` columns in memory from the column `first` on.
    pub fn columns(self, first: usize, count: usize) -> Self {
        let address = self.address + first as u64 * self.float.bytes();
        Self { address, shape: [self.shape[0], count], ..self }
    }

    /// Rows and columns of the matrix.
    fn dims(&self) -> [usize; 2] {
        let [rows, columns] = self.shape;
        if self.is_transposed { [columns, rows] } else { [rows, columns] }
    }

    /// A power of two of bytes that divides the address.
    fn alignment(&self) -> u32 {
        1 << (self.address | WHOLE_ALIGNMENT).trailing_zeros()
    }
}

/// `out = alpha a b + beta out + bias`
#[derive(Clone, Copy, Debug)]
pub struct ProductTerms {
    /// Factor of the product.
    pub alpha: f32,
    /// Factor of the values that are there; 0 does not read them.
    pub beta: f32,
    /// Address of a row that is added to each row, of the type of `out`; or 0.
    pub bias: u64,
}

impl ProductTerms {
    /// `out = a b`
    pub const REPLACE: Self = Self { alpha: 1.0, beta: 0.0, bias: 0 };
}

/// What an algorithm is chosen for.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct ProductKey {
    /// Of `b`, `a` and `out`, which is the library's order: shape, stride, type, transposition, alignment.
    matrices: [([usize; 2], usize, DeviceFloat, bool, u32); 3],
    has_bias: bool,
}

/// A product that the library is ready to compute.
struct PreparedProduct {
    operation: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Drop for PreparedProduct {
    fn drop(&mut self) {
        // SAFETY: `prepare` made what is not null, and nothing uses it any more: a product that is queued has copies.
        unsafe {
            for layout in self.layouts.into_iter().filter(|layout| !layout.is_null()) {
                let _ = lt::destroy_matrix_layout(layout);
            }
            if !self.operation.is_null() {
                let _ = lt::destroy_matmul_desc(self.operation);
            }
        }
    }
}

/// Products on one stream.
pub struct Products {
    gpu: Arc<Gpu>,
    stream: Arc<CudaStream>,
    workspace: ArenaRegion,
    handle: sys::cublasLtHandle_t,
    preference: sys::cublasLtMatmulPreference_t,
    prepared: RefCell<HashMap<ProductKey, PreparedProduct>>,
}

// SAFETY: the library's objects may be used by any thread, one at a time.
unsafe impl Send for Products {}

impl Products {
    /// Products on `stream` with a workspace, of which the library's documentation recommends 32 MiB.
    ///
    /// # Errors
    /// If the library refuses.
    pub fn new(gpu: &Arc<Gpu>, stream: &Arc<CudaStream>, workspace: ArenaRegion) -> Result<Self> {
        gpu.bind()?;
        // From here on the library's objects are destroyed with `products`.
        let mut products = Self {
            gpu: Arc::clone(gpu),
            stream: Arc::clone(stream),
            workspace,
            handle: lt::create_handle().map_err(|error| call("cublasLtCreate", error))?,
            preference: ptr::null_mut(),
            prepared: RefCell::default(),
        };
        products.preference = lt::create_matmul_pref()
            .map_err(|error| call("cublasLtMatmulPreferenceCreate", error))?;
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        products.prefer(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace.bytes)?;
        // Parts of a sum are added in f32 and in a fixed order, not in the type of the result.
        let scheme = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        products.prefer(Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &scheme)?;
        Ok(products)
    }

    /// Queues `out = alpha a b + beta out + bias`. Factors have the same type; sums are in f32.
    ///
    /// # Safety
    /// The matrices and the bias must be in memory that may be used like this until the stream is done.
    ///
    /// # Errors
    /// If shapes or types do not fit, or the library refuses.
    pub unsafe fn multiply(
        &self,
        out: DeviceMatrix,
        a: DeviceMatrix,
        b: DeviceMatrix,
        terms: ProductTerms,
    ) -> Result<()> {
        let ([m, k], [rows, n]) = (a.dims(), b.dims());
        if k != rows || out.dims() != [m, n] || a.float != b.float || out.is_transposed {
            return Err(GpuError::Misuse(format!("{out:?} is no product of {a:?} and {b:?}")));
        }
        if m == 0 || n == 0 {
            return Ok(());
        }
        self.gpu.bind()?;
        let key = ProductKey {
            matrices: [b, a, out]
                .map(|x| (x.shape, x.stride, x.float, x.is_transposed, x.alignment())),
            has_bias: terms.bias != 0,
        };
        let mut all = self.prepared.borrow_mut();
        if !all.contains_key(&key) {
            if all.len() >= MOST_PREPARED {
                all.clear();
            }
            all.insert(key, self.prepare(&key)?);
        }
        let Some(prepared) = all.get(&key) else { return Ok(()) };
        if key.has_bias {
            use sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER as BIAS;
            describe(prepared.operation, BIAS, &terms.bias)?;
        }
        let [b_layout, a_layout, layout] = prepared.layouts;
        // SAFETY: the objects are alive, the layouts are of these matrices, the caller answers for their memory, and
        // the arena of the workspace outlives the stream's work.
        unsafe {
            lt::matmul(
                self.handle,
                prepared.operation,
                (&raw const terms.alpha).cast(),
                (&raw const terms.beta).cast(),
                b.address as *const c_void,
                b_layout,
                a.address as *const c_void,
                a_layout,
                out.address as *const c_void,
                layout,
                out.address as *mut c_void,
                layout,
                &raw const prepared.algorithm,
                self.workspace.address as *mut c_void,
                self.workspace.bytes as usize,
                self.stream.cu_stream().cast(),
            )
        }
        .map_err(|error| call("cublasLtMatmul", error))
    }

    /// Describes a product to the library, which chooses the algorithm.
    fn prepare(&self, key: &ProductKey) -> Result<PreparedProduct> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
        let (null, algorithm) = (ptr::null_mut(), sys::cublasLtMatmulAlgo_t { data: [0; 8] });
        let mut prepared =
            PreparedProduct { operation: ptr::null_mut(), layouts: [null; 3], algorithm };
        let sums = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        prepared.operation = lt::create_matmul_desc(sums, DeviceFloat::F32.data_type())
            .map_err(|error| call("cublasLtMatmulDescCreate", error))?;
        for (layout, (shape, stride, float, ..)) in prepared.layouts.iter_mut().zip(key.matrices) {
            let [rows, columns] = shape.map(|size| size as u64);
            *layout = lt::create_matrix_layout(float.data_type(), columns, rows, stride as i64)
                .map_err(|error| call("cublasLtMatrixLayoutCreate", error))?;
        }
        let transposed =
            [Attribute::CUBLASLT_MATMUL_DESC_TRANSA, Attribute::CUBLASLT_MATMUL_DESC_TRANSB];
        for (attribute, (.., is_transposed, _)) in transposed.into_iter().zip(key.matrices) {
            describe(prepared.operation, attribute, &i32::from(is_transposed))?;
        }
        if key.has_bias {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
            describe(prepared.operation, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
        }
        let [b, a, out] = key.matrices.map(|matrix| matrix.4);
        for (attribute, alignment) in [
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, out),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out),
        ] {
            self.prefer(attribute, &alignment)?;
        }
        let [b, a, out] = prepared.layouts;
        // SAFETY: the objects are alive.
        let chosen = unsafe {
            lt::get_matmul_algo_heuristic(
                self.handle,
                prepared.operation,
                b,
                a,
                out,
                out,
                self.preference,
            )
        };
        prepared.algorithm =
            chosen.map_err(|error| call("cublasLtMatmulAlgoGetHeuristic", error))?.algo;
        Ok(prepared)
    }

    fn prefer<T>(
        &self,
        attribute: sys::cublasLtMatmulPreferenceAttributes_t,
        value: &T,
    ) -> Result<()> {
        let value = ptr::from_ref(value).cast();
        // SAFETY: the preference is alive, and the value has the attribute's type.
        unsafe { lt::set_matmul_pref_attribute(self.preference, attribute, value, size_of::<T>()) }
            .map_err(|error| call("cublasLtMatmulPreferenceSetAttribute", error))
    }
}

fn describe<T>(
    operation: sys::cublasLtMatmulDesc_t,
    attribute: sys::cublasLtMatmulDescAttributes_t,
    value: &T,
) -> Result<()> {
    let value = ptr::from_ref(value).cast();
    // SAFETY: the operation is alive, and the value has the attribute's type.
    unsafe { lt::set_matmul_desc_attribute(operation, attribute, value, size_of::<T>()) }
        .map_err(|error| call("cublasLtMatmulDescSetAttribute", error))
}

impl Drop for Products {
    fn drop(&mut self) {
        self.prepared.borrow_mut().clear();
        // SAFETY: `new` made them, and nothing uses them any more.
        unsafe {
            if !self.preference.is_null() {
                let _ = lt::destroy_matmul_pref(self.preference);
            }
            let _ = lt::destroy_handle(self.handle);
        }
    }
}
