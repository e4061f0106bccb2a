//! A table of the functions that we call, each resolved by name, none linked.

/// Declares a table of functions of one library.
///
/// Names are given without the vendor's prefix; `spell` makes the full name. A function of
/// `required` that is missing makes the whole table unusable and is named; one of `optional` is
/// `None`, and listed in `absent`.
macro_rules! symbols {
    (
        $(#[$doc:meta])*
        $table:ident {
            required { $($field:ident = $name:literal: fn($($arg:ty),*) -> $ret:ty;)* }
            optional { $($may:ident = $may_name:literal: fn($($may_arg:ty),*) -> $may_ret:ty;)* }
        }
    ) => {
        $(#[$doc])*
        pub(crate) struct $table {
            $(pub(crate) $field: unsafe extern "C" fn($($arg),*) -> $ret,)*
            $(pub(crate) $may: Option<unsafe extern "C" fn($($may_arg),*) -> $may_ret>,)*
            /// The optional functions that this library lacks.
            #[allow(dead_code, reason = "not every table's gaps are told")]
            pub(crate) absent: Vec<String>,
        }

        impl $table {
            /// Looks every function up; the error is the name of a required one that is missing.
            ///
            /// # Safety
            /// `library` speaks the interface that this table describes: a symbol's type cannot be
            /// looked up. The pointers stay good for the life of the process, because no
            /// [`Library`] is ever closed.
            ///
            /// [`Library`]: crate::library::Library
            pub(crate) unsafe fn resolve(
                library: &'static $crate::library::Library,
                spell: impl Fn(&str) -> String,
            ) -> std::result::Result<Self, String> {
                // Not every table has both kinds.
                #[allow(unused_mut, reason = "tables without optional functions")]
                let mut absent = Vec::new();
                Ok(Self {
                    $($field: {
                        let name = spell($name);
                        // SAFETY: the caller vouches for the library, so this name has this type in
                        // it.
                        match unsafe { library.symbol(&name) } {
                            Some(function) => function,
                            None => return Err(name),
                        }
                    },)*
                    $($may: {
                        let name = spell($may_name);
                        // SAFETY: the caller vouches for the library, so this name has this type in
                        // it.
                        let found = unsafe { library.symbol(&name) };
                        if found.is_none() {
                            absent.push(name);
                        }
                        found
                    },)*
                    absent,
                })
            }
        }
    };
}

pub(crate) use symbols;
