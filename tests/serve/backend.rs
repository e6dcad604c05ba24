//! Runs a test with each engine of clients.

/// Makes a test of each async function with the argument `EngineBackend`, for each backend.
macro_rules! with_each_backend {
    ($($test:ident),+ $(,)?) => {
        mod mistralrs {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $test() {
                super::$test(hone_engine::EngineBackend::Mistralrs).await;
            })+
        }
        mod native {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $test() {
                super::$test(hone_engine::EngineBackend::Native).await;
            })+
        }
    };
}
pub(crate) use with_each_backend;
