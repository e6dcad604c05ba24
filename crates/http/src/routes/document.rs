//! The OpenAPI document of the routes.

use std::collections::{BTreeMap, BTreeSet};

use schemars::JsonSchema as _;
use schemars::generate::{SchemaGenerator, SchemaSettings};
use serde_json::{Map, Value, json};

use super::table::{ApiRoute, RequestShape, SchemaOf};
use crate::auth::{Access, access};
use crate::body::{Field, fields_of, object_schema};
use crate::error::ApiError;
use crate::messages::wire::MessageError;

const JSON: &str = "application/json";

pub fn document(routes: &[ApiRoute]) -> Value {
    let settings = SchemaSettings::draft2020_12().for_serialize().with(|settings| {
        settings.definitions_path = "/components/schemas".into();
        settings.meta_schema = None;
    });
    let mut builder = Builder {
        generator: settings.into_generator(),
        schemas: Map::new(),
        errors: BTreeMap::new(),
    };
    let mut paths: BTreeMap<String, Map<String, Value>> = BTreeMap::new();
    for route in routes {
        let method = route.method.as_str().to_ascii_lowercase();
        let path = paths.entry(template(route.path)).or_default();
        path.insert(method, builder.operation(route));
    }
    let Builder { mut generator, mut schemas, errors } = builder;
    schemas.extend(generator.take_definitions(true));
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Hone",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "Serves a language model and trains it with the rewards of its users.",
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": errors,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    })
}

/// A path in OpenAPI's syntax.
pub fn template(path: &str) -> String {
    path.replace("{*", "{")
}

/// Makes operations and collects their schemas.
struct Builder {
    /// The schemas of responses.
    generator: SchemaGenerator,
    /// The schemas of requests.
    schemas: Map<String, Value>,
    /// The responses that several routes share.
    errors: BTreeMap<String, Value>,
}

impl Builder {
    fn operation(&mut self, route: &ApiRoute) -> Value {
        let mut responses = Map::new();
        responses.insert("200".to_owned(), self.success(route));
        let (kind, body): (_, SchemaOf) = match route.tag() {
            "Messages" => (
                MessageError::schema_name(),
                SchemaGenerator::subschema_for::<MessageError<'static>>,
            ),
            _ => (ApiError::schema_name(), SchemaGenerator::subschema_for::<ApiError>),
        };
        for status in errors_of(route) {
            let name = format!("{kind}{status}");
            let reference = format!("#/components/responses/{name}");
            responses.insert(status.to_string(), json!({"$ref": reference}));
            let error = self.error(body, status);
            self.errors.insert(name, error);
        }
        let mut operation = json!({
            "operationId": route.id,
            "summary": route.summary,
            "tags": [route.tag()],
            "parameters": parameters(route),
            "security": security(route.path),
            "responses": responses,
        });
        if !route.bodies.is_empty() {
            operation["requestBody"] = self.body(route);
        }
        operation
    }

    fn body(&mut self, route: &ApiRoute) -> Value {
        let shapes = route.bodies.iter().map(|(name, shape)| {
            let schema = match shape {
                RequestShape::Fields(table) => object_schema(table),
                RequestShape::Json(schema) => schema(),
            };
            self.schemas.insert((*name).to_owned(), schema);
            json!({"$ref": format!("#/components/schemas/{name}")})
        });
        let mut content = json!({"schema": any_of(shapes.collect())});
        if let Some(example) = &route.example {
            content["example"] = example.clone();
        }
        json!({"required": true, "content": {JSON: content}})
    }

    fn success(&mut self, route: &ApiRoute) -> Value {
        let mut contents: BTreeMap<&str, Vec<Value>> = BTreeMap::new();
        for (kind, schema) in &route.answers {
            contents.entry(*kind).or_default().push(schema(&mut self.generator).to_value());
        }
        let contents: Map<String, Value> = contents
            .into_iter()
            .map(|(kind, schemas)| (kind.to_owned(), json!({"schema": any_of(schemas)})))
            .collect();
        let mut headers = json!({"x-request-id": {"schema": {"type": "string"}}});
        if route.has_version {
            headers["x-hone-policy-version"] = json!({"schema": {"type": "integer", "minimum": 0}});
        }
        json!({"description": "Success.", "headers": headers, "content": contents})
    }

    fn error(&mut self, body: SchemaOf, status: u16) -> Value {
        let schema = body(&mut self.generator);
        let mut headers = json!({"x-request-id": {"schema": {"type": "string"}}});
        if status == 401 {
            headers["WWW-Authenticate"] = json!({"schema": {"const": "Bearer"}});
        } else if matches!(status, 429 | 503) {
            headers["Retry-After"] =
                json!({"schema": {"type": "integer"}, "description": "Seconds."});
        }
        let content = json!({JSON: {"schema": schema}});
        json!({"description": cause(status), "headers": headers, "content": content})
    }
}

fn any_of(mut schemas: Vec<Value>) -> Value {
    if schemas.len() == 1 { schemas.remove(0) } else { json!({"anyOf": schemas}) }
}

fn parameters(route: &ApiRoute) -> Vec<Value> {
    let in_path = path_parameters(route.path).map(
        |name| json!({"name": name, "in": "path", "required": true, "schema": path_schema(name)}),
    );
    in_path.chain(fields_of(route.query).map(query_parameter)).collect()
}

fn query_parameter(field: &Field) -> Value {
    let schema = field.query_schema();
    let (name, required) = (field.name, field.is_required);
    match name.strip_suffix("[KEY]") {
        None => json!({"name": name, "in": "query", "required": required, "schema": schema}),
        Some(name) => json!({
            "name": name, "in": "query", "schema": schema, "style": "deepObject", "explode": true,
        }),
    }
}

fn path_parameters(path: &'static str) -> impl Iterator<Item = &'static str> {
    let parts = path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
    parts.map(|name| name.trim_start_matches('*'))
}

fn path_schema(name: &str) -> Value {
    match name {
        "version" => json!({"type": "integer", "minimum": 0, "maximum": u64::MAX}),
        "key" => {
            json!({"type": "string", "pattern": "^([0-9a-f]{12}|([0-9a-f]{12})?\\.[0-9a-f]{12})$"})
        }
        _ => json!({"type": "string", "minLength": 1}),
    }
}

/// A key with one of the scopes, in one of two headers, or no key if the server requires none.
fn security(path: &str) -> Vec<Value> {
    let Access::Scopes(scopes) = access(path) else { return Vec::new() };
    let with =
        |scheme: &'static str| scopes.iter().map(move |scope| json!({scheme: [scope.as_str()]}));
    with("bearer").chain(with("apiKey")).chain([json!({})]).collect()
}

/// The statuses of a route's errors.
fn errors_of(route: &ApiRoute) -> BTreeSet<u16> {
    let mut errors: BTreeSet<u16> = route.errors.iter().copied().collect();
    if let Access::Scopes(_) = access(route.path) {
        errors.extend([401, 403, 429, 500, 503]);
    }
    if !route.bodies.is_empty() {
        errors.extend([400, 408, 413, 415]);
    }
    if !route.query.is_empty() {
        errors.insert(400);
    }
    if path_parameters(route.path).next().is_some() {
        errors.extend([400, 404]);
    }
    errors
}

fn cause(status: u16) -> &'static str {
    match status {
        400 => "The request is invalid.",
        401 => "There is no key, or it is unknown or expired.",
        403 => "The key lacks the scope of the route, or the server answers only its own machine.",
        404 => "There is no such thing.",
        408 => "The body did not arrive in time.",
        409 => "The trainer or the version is not in a state that permits the request.",
        413 => "The body is too large.",
        415 => "The content type is not `application/json`.",
        422 => {
            "A number is outside of its part's range, the `idempotency_key` was used for something else, or a \
             correction is too long."
        }
        429 => "A limit is reached; see `Retry-After`.",
        503 => "The server starts or shuts down, or accepts no writes; see `Retry-After`.",
        _ => "An internal failure.",
    }
}
