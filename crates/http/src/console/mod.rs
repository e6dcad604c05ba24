//! The console: a page for operators, and what only it reads. `ledger` reads records, `live` the running parts.
//!
//! The page is embedded in the program, without a build step. Its files contain no data, so they need no key.

pub mod ledger;
pub mod live;

use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};

use super::body::PathText;
use super::error::{ApiError, ErrorCode};

/// No inline script or style, nothing of another origin, and no frame around the page.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

/// The files beside the page: name, content type and text.
const FILES: [(&str, &str, &str); 7] = [
    ("app.js", SCRIPT, include_str!("app.js")),
    ("kit.js", SCRIPT, include_str!("kit.js")),
    ("views.js", SCRIPT, include_str!("views.js")),
    ("uplot.js", SCRIPT, include_str!("uplot.js")),
    ("style.css", CSS, include_str!("style.css")),
    ("uplot.css", CSS, include_str!("uplot.css")),
    ("icon.svg", "image/svg+xml", include_str!("icon.svg")),
];

/// `GET /console`.
pub async fn page() -> Response {
    embedded("text/html; charset=utf-8", include_str!("index.html"))
}

/// `GET /console/{file}`.
pub async fn asset(PathText(name): PathText) -> Result<Response, ApiError> {
    let file = FILES.iter().find(|(known, ..)| *known == name);
    let (_, kind, text) = file.ok_or_else(|| {
        ApiError::new(ErrorCode::NotFound, format!("the console has no file {name:?}"))
    })?;
    Ok(embedded(kind, text))
}

fn embedded(kind: &'static str, text: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    ];
    (headers.map(|(name, value)| (name, HeaderValue::from_static(value))), text).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_contains_no_script_style_or_foreign_file() {
        let page = include_str!("index.html");
        for (at, _) in page.match_indices("<script") {
            assert!(
                page[at..].starts_with("<script src=\"console/")
                    || page[at..].starts_with("<script type=\"module\" src=\"console/")
            );
        }
        assert!(!page.contains("<style") && !page.contains("style=") && !page.contains("http"));
        for (name, _, text) in FILES.iter().filter(|(name, ..)| *name != "uplot.js") {
            for forbidden in
                ["innerHTML", "insertAdjacentHTML", "eval(", "document.write", "https://"]
            {
                assert!(!text.contains(forbidden), "{name}: {forbidden}");
            }
        }
    }
}
