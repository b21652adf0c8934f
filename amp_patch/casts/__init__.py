"""O1: the casts around torch's functions, with their op lists, rules, wrappers and regions."""
