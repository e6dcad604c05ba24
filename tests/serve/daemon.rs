//! The binary as a child process on a free port.

use std::cell::RefCell;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use hone_engine::EngineBackend;

/// Time within which a daemon prints its address.
const START_LIMIT: Duration = Duration::from_secs(60);

/// The variables that select an engine, whatever the configuration file says.
fn selected(backend: EngineBackend) -> &'static [(&'static str, &'static str)] {
    match backend {
        EngineBackend::Mistralrs => &[("HONE_ENGINE_BACKEND", "mistralrs")],
        EngineBackend::Native => {
            &[("HONE_ENGINE_BACKEND", "native"), ("HONE_ENGINE_REPLICAS", "1")]
        }
    }
}

/// A running `hone serve`, killed when dropped.
pub struct Daemon {
    child: Child,
    pub url: String,
    pub client: reqwest::Client,
}

impl Daemon {
    /// Starts a daemon with the configuration `config` and the engine `backend`; `data` receives its
    /// files.
    pub fn start(backend: EngineBackend, data: &Path, config: &str, args: &[&str]) -> Self {
        let command = Command::new(env!("CARGO_BIN_EXE_hone"));
        Self::launch(command, backend, data, config, args, &[], Stdio::inherit())
    }

    /// [`Self::start`] with further environment variables, and a place for the log.
    pub fn start_with(
        backend: EngineBackend,
        data: &Path,
        config: &str,
        environment: &[(&str, &str)],
        log: Stdio,
    ) -> Self {
        let command = Command::new(env!("CARGO_BIN_EXE_hone"));
        Self::launch(command, backend, data, config, &[], environment, log)
    }

    /// [`Self::start`] with at most so many files and sockets open, and no right to have more.
    pub fn start_within(open: u32, data: &Path, config: &str) -> Self {
        let script = format!("ulimit -n {open} && exec \"$0\" \"$@\"");
        let mut command = Command::new("sh");
        command.args(["-c", &script, env!("CARGO_BIN_EXE_hone")]);
        let (backend, log) = (EngineBackend::Native, Stdio::inherit());
        Self::launch(command, backend, data, config, &[], &[], log)
    }

    fn launch(
        mut command: Command,
        backend: EngineBackend,
        data: &Path,
        config: &str,
        args: &[&str],
        environment: &[(&str, &str)],
        log: Stdio,
    ) -> Self {
        let file = data.join("hone.toml");
        std::fs::write(&file, config).unwrap();
        let mut child = command
            .args(["serve", "--bind", "127.0.0.1:0", "--config"])
            .arg(&file)
            .arg("--data")
            .arg(data.join("data"))
            .args(args)
            // With the default priority, other tests would leave no processor time to the trainer.
            .env("HONE_TRAIN_PRIORITY", "normal")
            .envs(selected(backend).iter().copied())
            .envs(environment.iter().copied())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut daemon = Self { child, url: String::new(), client: reqwest::Client::new() };
        let (sender, first) = mpsc::channel();
        thread::spawn(move || sender.send(lines.next()));
        let line = first.recv_timeout(START_LIMIT).ok().flatten().map(Result::unwrap);
        let line = line.unwrap_or_default();
        daemon.url = line.strip_prefix("listening on ").unwrap_or_default().to_owned();
        let address = daemon.url.trim_start_matches("https").trim_start_matches("http");
        assert!(address.starts_with("://127.0.0.1:"), "the first line was {line:?}");
        daemon
    }

    pub async fn get(&self, path: &str) -> Value {
        let response = self.client.get(format!("{}{path}", self.url)).send().await.unwrap();
        assert_eq!(response.status(), 200, "{path}");
        response.json().await.unwrap()
    }

    pub async fn metrics(&self) -> String {
        let response = self.client.get(format!("{}/metrics", self.url)).send().await.unwrap();
        response.text().await.unwrap()
    }

    pub async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let request = self.client.post(format!("{}{path}", self.url)).json(body);
        let response = request.send().await.unwrap();
        (response.status().as_u16(), response.json().await.unwrap())
    }

    /// Sends one chat request and returns the whole response.
    pub async fn ask(&self, question: &str, seed: u64) -> Value {
        let body = json!({
            "model": "default", "seed": seed, "max_tokens": 24,
            "messages": [{"role": "user", "content": question}],
        });
        let (status, answer) = self.post("/v1/chat/completions", &body).await;
        assert_eq!(status, 200, "{answer}");
        answer
    }

    /// Waits until the served version is at least `wanted`, and returns it.
    pub async fn version_at_least(&self, wanted: u64) -> u64 {
        let version = |status: &Value| status["policy_version"].as_u64().unwrap();
        version(&self.until(|status| version(status) >= wanted).await)
    }

    /// Waits until the trainer has waited for half a second, and returns the served version.
    pub async fn settled(&self) -> u64 {
        let since = RefCell::new((Value::Null, Instant::now()));
        let status = self.until(|status| {
            let now = json!([status["step"], status["policy_version"], status["state"]]);
            let mut since = since.borrow_mut();
            if since.0 != now {
                *since = (now, Instant::now());
            }
            status["state"] == "waiting" && since.1.elapsed() >= Duration::from_millis(500)
        });
        status.await["policy_version"].as_u64().unwrap()
    }

    /// Waits until the trainer's status fulfills a condition, and returns it.
    pub async fn until(&self, holds: impl Fn(&Value) -> bool) -> Value {
        let started = Instant::now();
        loop {
            let status = self.get("/admin/train").await;
            if holds(&status) {
                return status;
            }
            assert!(started.elapsed() < Duration::from_secs(60), "still waiting: {status}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Resident memory in bytes, on Linux.
    pub fn resident(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()));
        let status = status.unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
        line.split_whitespace().next().map_or(0, |kb| kb.parse::<u64>().unwrap() << 10)
    }

    fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        Command::new("kill").args([name, &pid]).status().unwrap();
    }

    /// Sends SIGHUP.
    pub fn hang_up(&self) {
        self.signal("-HUP");
    }

    /// Sends SIGTERM and returns the exit code.
    pub fn terminate(mut self) -> Option<i32> {
        self.signal("-TERM");
        self.child.wait().unwrap().code()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// The text of the first choice.
pub fn text(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().unwrap()
}
