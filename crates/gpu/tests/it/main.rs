//! Everything here happens in processes of its own: a library that was mapped stays mapped, and is
//! what every later question is about.
#![allow(unsafe_code, reason = "the tests play the application that uses the vendor's library")]

mod children;
mod examining;
mod finding;
mod real;
mod simulated;
mod stubs;
