//! SHA-256 of files, texts and lists of fields.

use std::fs::File;
use std::io;
use std::path::Path;

use sha2::{Digest as _, Sha256};

/// A SHA-256 digest under construction.
///
/// Each method adds its argument and returns the digest, so that calls chain.
#[derive(Clone, Default)]
pub struct Digest(Sha256);

impl Digest {
    /// An empty digest.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds bytes as they are.
    #[must_use]
    pub fn bytes(mut self, bytes: impl AsRef<[u8]>) -> Self {
        self.0.update(bytes);
        self
    }

    /// Adds the length in bytes as a little-endian `u64`, then the bytes. The length keeps
    /// `["ab", "c"]` and `["a", "bc"]` apart.
    #[must_use]
    pub fn field(self, bytes: impl AsRef<[u8]>) -> Self {
        let bytes = bytes.as_ref();
        self.bytes((bytes.len() as u64).to_le_bytes()).bytes(bytes)
    }

    /// The first `N` bytes of the digest. `N` is at most 32.
    pub fn prefix<const N: usize>(self) -> [u8; N] {
        const { assert!(N <= 32, "SHA-256 has 32 bytes") };
        let mut first = [0; N];
        first.copy_from_slice(&self.0.finalize()[..N]);
        first
    }

    /// The whole digest.
    pub fn finish(self) -> [u8; 32] {
        self.0.finalize().into()
    }

    /// The whole digest as 64 lowercase hexadecimal digits.
    pub fn hex(self) -> String {
        hex(&self.finish())
    }
}

/// Bytes as lowercase hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The SHA-256 of `bytes` in hexadecimal.
pub fn sha256(bytes: impl AsRef<[u8]>) -> String {
    Digest::new().bytes(bytes).hex()
}

/// The SHA-256 of a file's content in hexadecimal, read in blocks.
///
/// # Errors
/// If the file cannot be read.
pub fn sha256_file(path: &Path) -> io::Result<String> {
    let mut hasher = Sha256::new();
    io::copy(&mut File::open(path)?, &mut hasher)?;
    Ok(hex(&hasher.finalize()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_known_and_fields_keep_their_boundaries() {
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(sha256(""), empty);
        assert_eq!(Digest::new().hex(), empty);
        assert_eq!(Digest::new().bytes("a").bytes("bc").hex(), sha256("abc"));
        assert_eq!(hex(&Digest::new().bytes("abc").prefix::<3>()), sha256("abc")[..6]);
        let joined = |fields: &[&str]| {
            fields.iter().fold(Digest::new(), |digest, field| digest.field(field)).hex()
        };
        assert_ne!(joined(&["ab", "c"]), joined(&["a", "bc"]));
        assert_eq!(joined(&["a"]), sha256([1, 0, 0, 0, 0, 0, 0, 0, b'a']));
    }
}
