//! Values for tests.

/// Values of many magnitudes and both signs, which are the same in every run.
pub fn waves(n: usize, phase: f32) -> Vec<f32> {
    (0..n).map(|i| ((i as f32 * 1.3 + phase).sin() * 7.0).powi(3) / 90.0).collect()
}
