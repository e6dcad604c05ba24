//! The daemon's configuration: the embedded model, a free loopback port, and routes whose rewards
//! depend on `--rewards`.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

use hone_engine::{EngineBackend, EngineConfig};
use hone_reward::feedback::FeedbackType;
use hone_reward::kinds::{FeedbackParams, FormatStrict, NumericMatch, RewardKind};
use hone_reward::routes::{RewardConfig, RouteConfig, RouteList};
use hone_rollout::RolloutConfig;
use hone_train::config::{PeakRate, TrainConfig};
use hone_train::monitoring::warnings::WarningConfig;
use hone_train::policy::{CanaryConfig, CanaryLimit, GateConfig, PolicyConfig, Promotion};

use super::options::RewardsMode;
use super::task::{MAX_TOKENS, REWARD_MAX, THUMBS};
use hone_config::{Config, DataConfig, LogConfig, RunConfig, ServerConfig};

/// `metadata.task` of the users' questions.
pub const TASK_ASKED: &str = "addition";
/// `metadata.task` of the evaluation, whose route has no rewards, so that it is never trained on.
pub const TASK_HELD_OUT: &str = "held-out";
/// `metadata.task` of the users' questions during a sabotage.
pub const TASK_SABOTAGED: &str = "sabotaged";
/// Samples of an optimizer step.
pub const SAMPLES_PER_STEP: usize = 64;
/// Samples of a prompt.
pub const GROUP_SIZE: usize = 8;

/// As in configs/examples, the rate that was measured for a model of this size.
pub const LEARNING_RATE: f64 = 2e-3;

/// Weight of thumbs that hardly count in training, but as evidence.
const LIGHT_THUMBS: f64 = 0.02;

/// Requests that the demo sends at once to the native engine, which computes them in one batch.
const BATCHED_REQUESTS: usize = 16;

/// The configuration of a demo with its data in `dir`. Neither a file nor the environment changes it, so the
/// daemon speaks plain HTTP on a loopback address whatever `server.tls` is elsewhere. Each color of mistral.rs's slots has `cores`
/// engines, because an engine runs one sequence at a time on one thread.
pub fn build(mode: RewardsMode, steps: u64, seed: u64, dir: &Path, cores: usize) -> Config {
    Config {
        server: ServerConfig {
            bind: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            default_max_tokens: MAX_TOKENS,
            shutdown_grace_seconds: 10,
            ..ServerConfig::default()
        },
        data: DataConfig { dir: dir.to_owned(), min_free_bytes: 0 },
        engine: EngineConfig { replicas: cores.clamp(1, 8), ..EngineConfig::default() },
        rollout: RolloutConfig {
            group_size: GROUP_SIZE,
            max_tokens: MAX_TOKENS,
            max_ready_groups: match mode {
                // Groups have one member, and a step needs this many of them.
                RewardsMode::Feedback => 4 * SAMPLES_PER_STEP,
                RewardsMode::Both | RewardsMode::Graded => 4 * SAMPLES_PER_STEP / GROUP_SIZE,
            },
            ..RolloutConfig::default()
        },
        // All else is the default.
        train: TrainConfig {
            seed,
            max_steps: steps,
            samples_per_step: SAMPLES_PER_STEP,
            learning_rate: PeakRate::Fixed(LEARNING_RATE),
            warmup_steps: Some(2.0),
            ..TrainConfig::default()
        },
        policy: PolicyConfig {
            promotion: Promotion::Direct,
            publish_every: 1,
            ..PolicyConfig::default()
        },
        run: RunConfig {
            warnings: WarningConfig { reward_max: Some(REWARD_MAX), ..WarningConfig::default() },
            ..RunConfig::default()
        },
        log: LogConfig { level: "warn".to_owned(), ..LogConfig::default() },
        routes: RouteList(vec![
            RouteConfig {
                name: "eval".to_owned(),
                metadata: tagged(TASK_HELD_OUT),
                ..RouteConfig::default()
            },
            RouteConfig {
                name: "addition".to_owned(),
                rewards: rewards(mode),
                ..RouteConfig::default()
            },
        ]),
        ..Config::default()
    }
}

/// Serves with `backend`. The native engine has one replica, which uses all cores.
pub fn serve_with(config: &mut Config, backend: EngineBackend) {
    config.engine.backend = backend;
    if backend == EngineBackend::Native {
        config.engine.replicas = EngineConfig::default().replicas;
    }
}

/// Requests that the engine of a configuration computes in parallel.
pub fn parallel_requests(config: &EngineConfig) -> usize {
    match config.backend {
        EngineBackend::Mistralrs => config.replicas,
        EngineBackend::Native => config.slots.min(BATCHED_REQUESTS),
    }
}

/// Publishes versions through a gate or a canary. The canary's settings are for users who rate about a
/// hundred answers a second.
pub fn promote(config: &mut Config, promotion: Promotion) {
    if promotion == Promotion::Direct {
        return;
    }
    let usual = &config.policy;
    config.policy = PolicyConfig {
        promotion,
        publish_every: 5,
        canary: CanaryConfig {
            shares: vec![0.1, 0.25, 0.5],
            stage_ratings: 10,
            // The table in docs/safety.md: nine of ten canaries are decided by then.
            margin: 0.1,
            max_ratings: 1500,
            on_limit: CanaryLimit::Estimate,
            ..usual.canary.clone()
        },
        ..usual.clone()
    };
}

/// Adds a route whose graders reward wrong sums without the form. The exam would notice it, as the graders of
/// other prompts are right, so there is none: only the users' thumbs remain.
pub fn sabotage(config: &mut Config) {
    // Graders decide what is trained and users which version they get: with more weight, the thumbs of the
    // canaries before would correct what the graders do.
    for part in config.routes.0.iter_mut().flat_map(|route| &mut route.rewards) {
        if part.name == THUMBS {
            part.weight = LIGHT_THUMBS;
        }
    }
    let route = RouteConfig {
        name: TASK_SABOTAGED.to_owned(),
        metadata: tagged(TASK_SABOTAGED),
        rewards: graders(-1.0, -1.0).into_iter().chain([thumbs(LIGHT_THUMBS)]).collect(),
        ..RouteConfig::default()
    };
    config.routes.0.insert(0, route);
    config.policy.gate = GateConfig { holdout_share: 0.0, ..config.policy.gate.clone() };
    // Enough steps for users to notice what the graders do. Dozens of versions take part in ten seeds, so the
    // evidence must be stronger than for one; without it no version is promoted.
    config.policy.publish_every = 8;
    config.policy.canary = CanaryConfig {
        margin: 0.05,
        alpha: 0.01,
        max_ratings: 3000,
        on_limit: CanaryLimit::RollBack,
        ..config.policy.canary.clone()
    };
}

/// The configuration with which `hone serve` continues after a demo.
pub fn to_serve(demo: &Config) -> Config {
    let mut config = demo.clone();
    config.server.bind = ServerConfig::default().bind;
    config.train.max_steps = 0;
    config.log = LogConfig::default();
    config
}

/// The metadata of the requests of a task.
fn tagged(task: &str) -> BTreeMap<String, String> {
    BTreeMap::from([("task".to_owned(), task.to_owned())])
}

/// The parts of graders, with weights for the sum and the form.
fn graders(answer: f64, format: f64) -> [RewardConfig; 2] {
    let sum = RewardKind::NumericMatch(NumericMatch::default());
    let form = RewardKind::FormatStrict(FormatStrict::default());
    [RewardConfig::new("answer", answer, sum), RewardConfig::new("format", format, form)]
}

fn rewards(mode: RewardsMode) -> Vec<RewardConfig> {
    match mode {
        RewardsMode::Graded => graders(1.0, 0.5).into(),
        RewardsMode::Both => graders(1.0, 0.5).into_iter().chain([thumbs(0.5)]).collect(),
        RewardsMode::Feedback => vec![thumbs(1.0)],
    }
}

/// The part of the users' thumbs: a canary compares only ratings with bounds, which booleans have.
pub fn thumbs(weight: f64) -> RewardConfig {
    let params = FeedbackParams { r#type: FeedbackType::Boolean, ..FeedbackParams::default() };
    RewardConfig::new(THUMBS, weight, RewardKind::Feedback(params))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODES: [RewardsMode; 3] = [RewardsMode::Both, RewardsMode::Graded, RewardsMode::Feedback];

    fn config(mode: RewardsMode) -> Config {
        build(mode, 60, 1, Path::new("demo-data"), 2)
    }

    #[test]
    fn every_configuration_is_valid_as_a_file() {
        let mut all: Vec<Config> = MODES.map(config).into();
        all.extend(MODES.map(|mode| to_serve(&config(mode))));
        for (backend, parallel) in [(EngineBackend::Mistralrs, 2), (EngineBackend::Native, 16)] {
            let mut served = config(RewardsMode::Both);
            serve_with(&mut served, backend);
            let engine = &served.engine;
            assert_eq!((engine.backend, parallel_requests(engine)), (backend, parallel));
            all.push(served);
        }
        for promotion in [Promotion::Direct, Promotion::Gate, Promotion::Canary] {
            let mut promoted = config(RewardsMode::Both);
            promote(&mut promoted, promotion);
            assert_eq!(promoted.policy.promotion, promotion);
            sabotage(&mut promoted);
            all.push(promoted);
        }
        for config in all {
            let text = toml::to_string(&config).unwrap();
            let mut file = hone_config::parse(&text).unwrap();
            // A constant of the daemon.
            file.data.min_free_bytes = 0;
            assert_eq!(file, config, "{text}");
        }
    }

    #[test]
    fn the_sabotage_rewards_what_users_dislike_and_lets_them_judge() {
        let mut config = config(RewardsMode::Both);
        sabotage(&mut config);
        let route = &config.routes.0[0];
        assert_eq!(route.metadata["task"], TASK_SABOTAGED);
        let weights: Vec<_> = route.rewards.iter().map(|p| (p.name.as_str(), p.weight)).collect();
        assert_eq!(weights, [("answer", -1.0), ("format", -1.0), (THUMBS, LIGHT_THUMBS)]);
        assert_eq!(config.policy.gate.holdout_share, 0.0);
    }

    #[test]
    fn the_mode_selects_the_reward_parts_and_rollouts_are_enough_for_two_steps() {
        for (mode, members, parts) in [
            (RewardsMode::Both, GROUP_SIZE, &["answer", "format", "thumbs"][..]),
            (RewardsMode::Graded, GROUP_SIZE, &["answer", "format"]),
            (RewardsMode::Feedback, 1, &["thumbs"]),
        ] {
            let config = config(mode);
            let [eval, users] = config.routes.0.as_slice() else { panic!("{:?}", config.routes) };
            assert!(eval.rewards.is_empty() && eval.metadata["task"] == TASK_HELD_OUT, "{mode:?}");
            assert!(users.metadata.is_empty(), "the last route matches everything");
            let names: Vec<&str> = users.rewards.iter().map(|part| part.name.as_str()).collect();
            assert_eq!(names, parts, "{mode:?}");
            let most = config.rollout.max_ready_groups * members;
            assert!(most >= 2 * config.train.samples_per_step, "{mode:?}");
        }
    }
}
