//! The parameters of `kind = "webhook"`.

use hone_core::config::Checked;
use hone_core::config::between;
use hone_core::config::{Secret, from_environment};

use crate::kinds::define::parameters;
use crate::remote::{CallLimits, call_limits, check_url};

parameters! {
    /// Parameters of `kind = "webhook"`: the service that computes the values, and how it is called.
    pub struct WebhookParams {
        /// Address that batches are posted to: https, or plain http to this machine (see `allow_http`).
        pub url: String,
        /// Environment variable with the secret of the HMAC signature; empty sends no signature.
        pub secret_env: String = String::new(),
        /// The value of `secret_env`, from [`WebhookParams::resolve`].
        #[serde(skip)]
        pub secret: Option<Secret> = None,
        /// Most samples in one request.
        pub max_batch: usize = 32,
        /// Most requests at a time.
        pub max_concurrency: usize = 4,
        /// Milliseconds for one attempt, from connecting to the last byte.
        pub timeout_ms: u64 = 5_000,
        /// Attempts after the first, on a failed connection, 408, 429 and 5xx only.
        pub retries: u32 = 2,
        /// Milliseconds before the first retry; each further one waits twice as long, jittered.
        pub backoff_ms: u64 = 200,
        /// Longest wait between attempts, in milliseconds; also for `Retry-After`.
        pub max_backoff_ms: u64 = 10_000,
        /// Failed attempts in a row that open the circuit.
        pub breaker_failures: u32 = 5,
        /// Milliseconds that an open circuit waits before one request probes the service.
        pub breaker_cooldown_ms: u64 = 10_000,
        /// Longest answer in bytes.
        pub max_response_bytes: usize = 1_048_576,
        /// Whether plain http may leave this machine.
        pub allow_http: bool = false,
    }
}

impl WebhookParams {
    /// How the service is called.
    pub fn limits(&self) -> CallLimits {
        call_limits!(self)
    }

    /// Looks up the secret that `secret_env` names.
    ///
    /// # Errors
    /// The rest of a sentence that begins with the key `secret_env`.
    pub fn resolve(&mut self, lookup: impl Fn(&str) -> Option<String>) -> Result<(), String> {
        self.secret = from_environment(&self.secret_env, lookup)?;
        Ok(())
    }

    /// Checks every range.
    ///
    /// # Errors
    /// The first value that is out of range.
    pub fn check(&self) -> Checked {
        check_url("url", &self.url, self.allow_http)?;
        between("max_batch", self.max_batch, 1, 4096)?;
        between("max_concurrency", self.max_concurrency, 1, 1024)?;
        self.limits().check("")
    }

    /// A webhook at `url` with every default.
    #[cfg(test)]
    pub fn new(url: impl Into<String>) -> Self {
        serde_json::from_value(serde_json::json!({ "url": url.into() })).unwrap()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(params: &WebhookParams) -> String {
        params.check().unwrap_err().sentence()
    }

    #[test]
    fn keys_are_read_and_the_secret_is_never_written() {
        let read: WebhookParams = toml::from_str("url = \"https://grader.example/score\"").unwrap();
        assert_eq!(read, WebhookParams::new("https://grader.example/score"));
        assert_eq!(read.check(), Ok(()));
        let error = toml::from_str::<WebhookParams>("url = \"x\"\nurls = 1").unwrap_err();
        assert!(error.to_string().contains("urls"), "{error}");
        // The secret itself has no key.
        assert!(toml::from_str::<WebhookParams>("url = \"x\"\nsecret = \"s\"").is_err());
        let mut signed = read;
        signed.secret_env = "GRADER_SECRET".to_owned();
        signed.resolve(|_| Some("hunter2".to_owned())).unwrap();
        assert!(!toml::to_string(&signed).unwrap().contains("hunter2"));
        assert!(!format!("{signed:?}").contains("hunter2"));
    }

    #[test]
    fn addresses_are_https_or_loopback() {
        for good in
            ["https://a.example/x", "http://localhost:1/x", "http://127.0.0.9/", "http://[::1]:8/"]
        {
            assert_eq!(WebhookParams::new(good).check(), Ok(()), "{good}");
        }
        let far = WebhookParams::new("http://grader:8000/score");
        insta::assert_snapshot!(refusal(&far), @r#"url is "http://grader:8000/score": it must be https, or http to this machine; allow_http = true permits plain http elsewhere, as on a private network"#);
        assert_eq!(WebhookParams { allow_http: true, ..far }.check(), Ok(()));
        insta::assert_snapshot!(refusal(&WebhookParams::new("ftp://x/")), @r#"url is "ftp://x/": it must be an http or https address"#);
        insta::assert_snapshot!(refusal(&WebhookParams::new("grader")), @r#"url is "grader": it must be an address such as "https://grader.example/score""#);
        insta::assert_snapshot!(refusal(&WebhookParams::new("https://me:hunter2@x/")), @"url is a hidden value: it must be an address without a user name or password, which logs could show");
    }

    #[test]
    fn ranges_are_named() {
        let base = WebhookParams::new("https://a.example/");
        insta::assert_snapshot!(refusal(&WebhookParams { max_batch: 0, ..base.clone() }), @"max_batch is 0: it must be from 1 to 4096");
        insta::assert_snapshot!(refusal(&WebhookParams { retries: 11, ..base.clone() }), @"retries is 11: it must be from 0 to 10");
        insta::assert_snapshot!(refusal(&WebhookParams { max_backoff_ms: 5, ..base }), @"max_backoff_ms is 5: it must be from 200 to 300000");
    }
}
