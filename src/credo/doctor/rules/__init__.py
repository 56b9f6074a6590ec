"""The rules of the doctor, by what they are about."""
