//! `[server.tls]`: the files of the server's certificate.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use hone_core::config::{Checked, Problem};

/// `[server.tls]`. Empty paths mean plain HTTP.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TlsConfig {
    /// A PEM file with the server's certificate and those that lead to its root.
    pub certificate: PathBuf,
    /// A PEM file with the certificate's private key.
    pub key: PathBuf,
}

impl TlsConfig {
    /// Whether the server speaks TLS.
    pub fn is_enabled(&self) -> bool {
        !self.certificate.as_os_str().is_empty()
    }

    pub(super) fn check(&self) -> Checked {
        let Self { certificate, key } = self;
        for (name, file, other, beside) in
            [("certificate", certificate, "key", key), ("key", key, "certificate", certificate)]
        {
            if file.as_os_str().is_empty() && !beside.as_os_str().is_empty() {
                let allowed = format!("the path of a file beside server.tls.{other}");
                return Err(Problem::value(&format!("server.tls.{name}"), "\"\"", &allowed));
            }
        }
        Ok(())
    }
}
