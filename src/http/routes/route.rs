//! One route: its handler, and what the OpenAPI document contains about it.

use std::borrow::Cow;
use std::sync::Arc;

use axum::handler::Handler;
use axum::http::Method;
use axum::routing::{self, MethodRouter};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::Value;

use crate::http::AppState;
use crate::http::body::FieldTable;
use crate::http::error::ApiError;

/// Makes a schema, and adds those to which it refers to the generator.
type SchemaOf = fn(&mut SchemaGenerator) -> Schema;

/// A route, with one method of a path.
pub(super) struct ApiRoute {
    pub(super) method: Method,
    /// In axum's syntax.
    pub(super) path: &'static str,
    pub(super) handler: MethodRouter<Arc<AppState>>,
    /// Unique in the document.
    pub(super) id: &'static str,
    pub(super) summary: &'static str,
    /// The group to which the route belongs.
    pub(super) tag: &'static str,
    pub(super) query: FieldTable,
    /// The shapes of the body, each with the name of its schema.
    pub(super) bodies: Vec<(&'static str, RequestShape)>,
    pub(super) example: Option<Value>,
    /// The content types of a response with the status 200, each with a schema.
    pub(super) answers: Vec<(&'static str, SchemaOf)>,
    /// Whether a response names the policy version.
    pub(super) has_version: bool,
    /// Statuses of errors that follow from the purpose of the route.
    pub(super) errors: &'static [u16],
    /// The body of an error.
    pub(super) error_body: Named,
}

/// A type of bodies: its name and its schema.
#[derive(Clone, Copy)]
pub(super) struct Named {
    pub(super) name: fn() -> Cow<'static, str>,
    pub(super) schema: SchemaOf,
}

impl Named {
    fn of<T: JsonSchema>() -> Self {
        Self { name: T::schema_name, schema: SchemaGenerator::subschema_for::<T> }
    }
}

/// What a body may be.
#[derive(Clone, Copy)]
pub(super) enum RequestShape {
    /// An object with these fields.
    Fields(FieldTable),
    /// What a JSON schema describes.
    Json(fn() -> Value),
}

impl ApiRoute {
    pub(super) fn get<H, T>(path: &'static str, handler: H) -> Self
    where
        H: Handler<T, Arc<AppState>>,
        T: 'static,
    {
        Self::new(Method::GET, path, routing::get(handler))
    }

    pub(super) fn post<H, T>(path: &'static str, handler: H) -> Self
    where
        H: Handler<T, Arc<AppState>>,
        T: 'static,
    {
        Self::new(Method::POST, path, routing::post(handler))
    }

    pub(super) fn delete<H, T>(path: &'static str, handler: H) -> Self
    where
        H: Handler<T, Arc<AppState>>,
        T: 'static,
    {
        Self::new(Method::DELETE, path, routing::delete(handler))
    }

    fn new(method: Method, path: &'static str, handler: MethodRouter<Arc<AppState>>) -> Self {
        Self {
            method,
            path,
            handler,
            id: "",
            summary: "",
            tag: "",
            query: &[],
            bodies: Vec::new(),
            example: None,
            answers: Vec::new(),
            has_version: false,
            errors: &[],
            error_body: Named::of::<ApiError>(),
        }
    }

    /// Names the route.
    pub(super) fn named(self, id: &'static str, summary: &'static str) -> Self {
        Self { id, summary, ..self }
    }

    /// The parameters of the query.
    pub(super) fn query(self, query: FieldTable) -> Self {
        Self { query, ..self }
    }

    /// An object that the body may be.
    pub(super) fn takes(self, name: &'static str, fields: FieldTable) -> Self {
        self.takes_shape(name, RequestShape::Fields(fields))
    }

    /// Another shape that the body may have.
    pub(super) fn takes_json(self, name: &'static str, schema: fn() -> Value) -> Self {
        self.takes_shape(name, RequestShape::Json(schema))
    }

    fn takes_shape(mut self, name: &'static str, shape: RequestShape) -> Self {
        self.bodies.push((name, shape));
        self
    }

    /// A body that is answered with the status 200.
    pub(super) fn example(self, example: Value) -> Self {
        Self { example: Some(example), ..self }
    }

    /// The response is a `T`, or one of several types.
    pub(super) fn answers<T: JsonSchema>(mut self) -> Self {
        self.answers.push(("application/json", SchemaGenerator::subschema_for::<T>));
        self
    }

    /// The response is a stream if the request asks for one, and the data of its events are a `T`.
    pub(super) fn streams<T: JsonSchema>(mut self) -> Self {
        self.answers.push(("text/event-stream", events_of::<T>));
        self
    }

    /// The response is text.
    pub(super) fn answers_text(mut self) -> Self {
        self.answers.push(("text/plain", SchemaGenerator::subschema_for::<str>));
        self
    }

    /// The response has the policy version.
    pub(super) fn with_version(self) -> Self {
        Self { has_version: true, ..self }
    }

    /// The statuses of errors that follow from the purpose of the route.
    pub(super) fn errors(self, errors: &'static [u16]) -> Self {
        Self { errors, ..self }
    }

    /// Errors of the route have another shape.
    pub(super) fn fails_as<T: JsonSchema>(self) -> Self {
        Self { error_body: Named::of::<T>(), ..self }
    }
}

fn events_of<T: JsonSchema>(generator: &mut SchemaGenerator) -> Schema {
    let event = generator.subschema_for::<T>();
    json_schema!({
        "type": "string",
        "description": "Server-sent events. The data of each is JSON, except for a last `[DONE]`.",
        "contentMediaType": "application/json",
        "contentSchema": event,
    })
}
