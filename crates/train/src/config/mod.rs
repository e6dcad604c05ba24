//! The keys of `[train]` and `[run.warnings]`, with their defaults and ranges.

mod check;
mod objective;
mod optimizer;
mod peak_rate;
mod replay;
mod timetable;
mod train;
mod warnings;

pub use objective::{
    AdvantageBaseline, AdvantageScale, CorrectionConfig, CorrectionMode, EntropyConfig, KlConfig,
    KlEstimator, LossKind, RatioLevel, RewardAggregation, VespoConfig, ZeroVariance,
};
pub use optimizer::{OptimizerKind, Recompute, ScheduleKind};
pub use peak_rate::PeakRate;
pub use replay::ReplayConfig;
pub(crate) use timetable::day;
pub use timetable::{DailyWindow, TrainWhen};
pub use train::TrainConfig;
pub use warnings::{WarningAction, WarningActions, WarningConfig};
