//! TLS with the certificate of `server.tls`, which a reload replaces while connections are open.

use std::fmt::Display;
#[cfg(unix)]
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use chrono::NaiveDateTime;
use parking_lot::RwLock;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls;
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use hone_core::config::ConfigError;
use hone_core::metrics::Metrics;

use crate::config::TlsConfig;

/// The only protocol within TLS.
const HTTP: &[u8] = b"http/1.1";

const CERTIFICATE: &str = "server.tls.certificate";
const KEY: &str = "server.tls.key";

/// How new connections are secured.
#[derive(Default)]
pub struct Tls(RwLock<Option<LoadedCertificate>>);

/// What accepts new connections, and until when clients accept it.
#[derive(Clone)]
pub struct LoadedCertificate {
    acceptor: TlsAcceptor,
    /// Unix seconds at which the first certificate of the chain expires; `None` if the file does not say.
    expiry: Option<i64>,
}

impl Tls {
    /// Reads the files of a configuration.
    ///
    /// # Errors
    /// If a file cannot be read or is not in PEM, or the key does not belong to the certificate.
    pub fn load(config: &TlsConfig) -> Result<Self, ConfigError> {
        Ok(Self(RwLock::new(read(config)?)))
    }

    /// Whether connections are secured.
    pub fn is_enabled(&self) -> bool {
        self.acceptor().is_some()
    }

    /// Reads the files again, for [`Self::replace`].
    ///
    /// # Errors
    /// As [`Self::load`], and if the server would change between plain HTTP and TLS.
    pub fn read_again(&self, config: &TlsConfig) -> Result<Option<LoadedCertificate>, ConfigError> {
        let (was, becomes) = (self.is_enabled(), config.is_enabled());
        if was != becomes {
            let change = if was { "was set" } else { "was empty" };
            return Err(ConfigError::Invalid(format!(
                "{CERTIFICATE} {change} at the start: restart to change between plain HTTP and TLS"
            )));
        }
        read(config)
    }

    /// Secures further connections with other files.
    pub fn replace(&self, loaded: Option<LoadedCertificate>) {
        *self.0.write() = loaded;
    }

    /// Sets the metric of the expiry.
    #[expect(clippy::cast_precision_loss, reason = "seconds")]
    pub fn report(&self, metrics: &Metrics) {
        let expiry = self.0.read().as_ref().and_then(|loaded| loaded.expiry);
        metrics.http_certificate_expiry.set(expiry.unwrap_or_default() as f64);
    }

    /// What accepts a new connection; `None` for plain HTTP.
    pub(super) fn acceptor(&self) -> Option<TlsAcceptor> {
        self.0.read().as_ref().map(|loaded| loaded.acceptor.clone())
    }
}

/// What accepts TLS with the files of a configuration; `None` for plain HTTP.
fn read(config: &TlsConfig) -> Result<Option<LoadedCertificate>, ConfigError> {
    if !config.is_enabled() {
        return Ok(None);
    }
    let TlsConfig { certificate, key } = config;
    let chain = CertificateDer::pem_slice_iter(&bytes(CERTIFICATE, certificate)?)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|_| refused(CERTIFICATE, certificate, "it is not a PEM file"))?;
    if chain.is_empty() {
        return Err(refused(CERTIFICATE, certificate, "it has no certificate in PEM"));
    }
    let expiry = chain.iter().filter_map(|certificate| not_after(certificate)).min();
    #[cfg(unix)]
    if std::fs::metadata(key).is_ok_and(|file| file.permissions().mode() & 0o007 != 0) {
        tracing::warn!(file = %key.display(), "every user of this machine can open {KEY}");
    }
    // An error of the parser could quote the key.
    let secret = PrivateKeyDer::from_pem_slice(&bytes(KEY, key)?)
        .map_err(|_| refused(KEY, key, "it has no private key in PEM"))?;
    let unusable = |error: rustls::Error| {
        let file = certificate.display();
        refused(KEY, key, format_args!("it cannot be used with the certificate {file}: {error}"))
    };
    // The process has two providers, so the default one would be undefined.
    let provider = Arc::new(aws_lc_rs::default_provider());
    let mut settings = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(unusable)?
        .with_no_client_auth()
        .with_single_cert(chain, secret)
        .map_err(unusable)?;
    settings.alpn_protocols = vec![HTTP.to_vec()];
    Ok(Some(LoadedCertificate { acceptor: TlsAcceptor::from(Arc::new(settings)), expiry }))
}

/// The end of a certificate's validity (RFC 5280, section 4.1) in Unix seconds; `None` if it is not in DER.
fn not_after(certificate: &[u8]) -> Option<i64> {
    let (tbs, _) = element(element(certificate)?.0)?;
    let mut rest = tbs;
    // A version in a context tag, which may be missing, then serial number, algorithm and issuer.
    for _ in 0..3 + usize::from(tbs.first() == Some(&0xa0)) {
        rest = element(rest)?.1;
    }
    let after_begin = element(element(rest)?.0)?.1;
    let text = std::str::from_utf8(element(after_begin)?.0).ok()?;
    // UTCTime has two digits of the year, from 1950 on; GeneralizedTime has four.
    let century = match text.len() {
        13 if *text >= *"50" => "19",
        13 => "20",
        _ => "",
    };
    let time = NaiveDateTime::parse_from_str(&format!("{century}{text}"), "%Y%m%d%H%M%SZ").ok()?;
    Some(time.and_utc().timestamp())
}

/// The content of the first element in DER, and what follows the element.
fn element(der: &[u8]) -> Option<(&[u8], &[u8])> {
    let (&[_, first], rest) = der.split_first_chunk::<2>()?;
    let (length, rest) = match first {
        0..0x80 => (usize::from(first), rest),
        _ => {
            let (digits, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
            let fits = digits.len() <= 4;
            let length = digits.iter().fold(0, |length, digit| length << 8 | usize::from(*digit));
            (fits.then_some(length)?, rest)
        }
    };
    rest.split_at_checked(length)
}

fn bytes(field: &str, file: &Path) -> Result<Vec<u8>, ConfigError> {
    let unreadable =
        |error: std::io::Error| refused(field, file, format_args!("it cannot be read: {error}"));
    std::fs::read(file).map_err(unreadable)
}

fn refused(field: &str, file: &Path, reason: impl Display) -> ConfigError {
    ConfigError::Invalid(format!("{field} is {}: {reason}", file.display()))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tls").join(name)
    }

    fn files(certificate: &str, key: &str) -> TlsConfig {
        TlsConfig { certificate: fixture(certificate), key: fixture(key) }
    }

    #[test]
    fn errors_name_the_field_and_the_file() {
        assert!(Tls::load(&files("first.pem", "first.key.pem")).unwrap().is_enabled());
        assert!(!Tls::load(&TlsConfig::default()).unwrap().is_enabled());
        for (certificate, key, field, file, reason) in [
            ("none.pem", "first.key.pem", CERTIFICATE, "none.pem", "it cannot be read"),
            ("first.key.pem", "first.key.pem", CERTIFICATE, "first.key.pem", "no certificate"),
            ("first.pem", "none.pem", KEY, "none.pem", "it cannot be read"),
            ("first.pem", "first.pem", KEY, "first.pem", "it has no private key"),
            ("first.pem", "second.key.pem", KEY, "second.key.pem", "it cannot be used with"),
        ] {
            let error = Tls::load(&files(certificate, key)).err().unwrap().to_string();
            assert!(error.starts_with(&format!("{field} is ")), "{error}");
            assert!(error.contains(file) && error.contains(reason), "{error}");
        }
    }

    #[test]
    fn the_first_expiry_is_that_of_the_file() {
        let tls = Tls::load(&files("first.pem", "first.key.pem")).unwrap();
        let metrics = Metrics::new().unwrap();
        tls.report(&metrics);
        // 2120-01-01, as `openssl x509 -enddate` prints it.
        assert_eq!(metrics.http_certificate_expiry.get(), 4_733_510_400.0);
        for damaged in [&[][..], &[0x30], &[0x30, 0x82, 1], &[0x30, 0x84, 255, 255, 255, 255, 0]] {
            assert_eq!(not_after(damaged), None);
        }
        assert!(
            element(&[0x30, 0x80]).is_some_and(|(inner, rest)| inner.is_empty() && rest.is_empty())
        );
    }

    #[test]
    fn a_reload_does_not_turn_tls_on_or_off() {
        let (plain, secured) = (TlsConfig::default(), files("first.pem", "first.key.pem"));
        for (before, after) in [(&plain, &secured), (&secured, &plain)] {
            let tls = Tls::load(before).unwrap();
            let error = tls.read_again(after).err().unwrap().to_string();
            assert!(error.contains("restart"), "{error}");
            tls.replace(tls.read_again(before).unwrap());
            assert_eq!(tls.is_enabled(), before.is_enabled());
        }
    }
}
