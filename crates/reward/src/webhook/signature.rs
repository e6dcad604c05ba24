//! `Hone-Signature: t=SECONDS,v1=HEX`: authenticates the sender and the time of a request.
//!
//! `HEX` is the HMAC-SHA256 (RFC 2104) of `SECONDS`, a full stop and the body's bytes with the shared
//! secret, as in Stripe's webhooks. A receiver should compare in constant time and refuse an old `t`.

use hmac::{Hmac, Mac};
use sha2::Sha256;

use hone_core::config::Secret;
use hone_core::digest::hex;

/// The header's name.
pub const HEADER: &str = "hone-signature";

/// The header's value for a body sent at `seconds` since the Unix epoch.
pub fn sign(secret: &Secret, seconds: u64, body: &[u8]) -> String {
    // Cannot fail: HMAC accepts keys of any length.
    let mac = Hmac::<Sha256>::new_from_slice(secret.expose().as_bytes()).map(|mac| {
        hex(&mac.chain_update(format!("{seconds}.")).chain_update(body).finalize().into_bytes())
    });
    format!("t={seconds},v1={}", mac.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::super::tests::hmac_by_definition;
    use super::*;

    #[test]
    fn matches_the_definition_and_the_standard() {
        // RFC 4231, test case 2.
        assert_eq!(
            hmac_by_definition(b"Jefe", b"what do ya want for nothing?"),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
        );
        for secret in ["Jefe", "a", &"long".repeat(40)] {
            let signed = sign(&Secret::new(secret), 1_700_000_000, b"{\"id\":1}");
            let expected = hmac_by_definition(secret.as_bytes(), b"1700000000.{\"id\":1}");
            assert_eq!(signed, format!("t=1700000000,v1={expected}"));
        }
    }
}
